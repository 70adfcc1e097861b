"""`gspo-mega certify`: one recorded batch and one checkpoint in many layouts, which must give the same numbers.

`cases.py` says what runs, `program.py` starts ranks for it, `ranks.py`
runs the cases on them, `batch.py` is the recorded batch, `measure.py` what is measured,
`compare.py` how far that is from the reference, `program.py` the report.
`vectors.py` replays reference vectors (tools/check_vectors.py) and needs no ranks.
"""
