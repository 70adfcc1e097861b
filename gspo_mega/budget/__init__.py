"""`gspo-mega budget`: where the mismatch of trainer and server comes from, and whether the clip range can bear it.

`causes.py` is the list of causes, `walks.py` changes them one after the other, `attribution.py` makes rows of numbers
of the differences, `faults.py` finds what is no rounding, `advice.py` says it in words, `report_budget.py` shows it.
`conduct.py` starts servers and ranks for it, `budget_ranks.py` runs on them with `server_scores.py` and
`trainer_scores.py`. The first five are functions of numbers alone.
"""
