"""The maths of a step: objectives, advantages, KL term, value loss, correction, rounding. Tensors in, tensors out."""
