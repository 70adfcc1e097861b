"""`gspo-mega drill`: faults in real small runs, drawn by seed, and whether each run ends as an undisturbed one does.

`kinds.py` is the table of faults. `scene.py` is a run under way: its processes, its disk, its network. `outcome.py` is
what must be equal. `plan.py` draws, and `program.py` runs the drill and keeps its rows.
"""
