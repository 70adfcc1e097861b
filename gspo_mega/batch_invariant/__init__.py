"""Operations whose result for a row does not depend on the other rows: the trainer's and the servers' with
`engine.batch_invariant`, on a CPU. What is left to a library here was measured
(docs/studies/true_on_policy.md). No model, no Megatron, no SGLang.
"""
