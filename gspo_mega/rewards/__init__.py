"""Verifiers, and the pool of isolated processes that scores responses.

`pool.py` scores an episode; `scoring_worker.py` is a process that calls the functions; `functions.py` names the
built-in ones, most of them in `builtin.py`; `services.py` asks services over HTTP; `weighted_sum.py` adds up.
"""
