"""`gspo-mega budget`: where the mismatch of trainer and server comes from, and whether the clip range can bear it.

Functions of numbers alone: `causes.py` is the list of causes, `walks.py` changes them
one after the other, `attribution.py` makes rows of the differences, `faults.py` finds
what is no rounding, `budget_findings.py` is all of that for one budget, `advice.py`
says it in words, `report_budget.py` shows it. `conduct.py` starts servers and ranks for
it, and `budget_ranks.py` runs on them, with `fixed_tokens.py`,
`server_scores.py` and `trainer_scores.py`.
"""
