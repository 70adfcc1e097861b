"""`gspo-mega mismatch`: find where the mismatch of trainer and server comes from, and whether the clip range bears it.

Pure functions of numbers: `causes.py` lists the causes, `walks.py` changes them one after the other, `attribution.py`
makes table rows of the differences, `faults.py` finds what is not rounding, and `findings.py` combines all of that and
puts it in words. `run.py` starts servers and ranks and shows the result; `ranks.py` runs on the ranks.
`fixed_tokens.py` keeps the tokens, and `served_folders.py` makes weights for the servers.
"""
