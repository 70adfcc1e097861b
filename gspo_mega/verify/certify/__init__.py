"""`gspo-mega certify`: one recorded batch and one checkpoint in many layouts, which must give the same numbers.

`cases.py` lists the cases, `program.py` starts ranks for them and reports, and `ranks.py` runs them on these ranks.
`batch.py` makes the recorded batch, `measure.py` and `steps.py` measure, and `compare.py` compares with the reference.
`vectors.py` replays reference vectors (tools/check_vectors.py) and needs no ranks.
"""
