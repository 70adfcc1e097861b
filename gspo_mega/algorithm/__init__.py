"""The maths of a step: tensors in, tensors out.

`objective.py` has the importance ratio, the clip and the mean; `surrogates.py` the terms of other objectives;
`advantages.py` advantages of groups, turns and tokens; `losses.py` the KL term and the value loss; `correction.py`
which responses the mismatch drops; `diagnostics.py` statistics for metrics; `fp8.py` and `rounding.py` number formats.
"""
