"""The reference policy of a run's KL term: its folder, its weights, and the check that it has the policy's shape."""

from __future__ import annotations

from gspo_mega.base.errors import ModelError
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config.schema import Config
from gspo_mega.engine.frozen_reference import ReferencePolicy
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec, shape_differences


def reference_path(config: Config) -> str:
    """The Hugging Face folder of the KL term's reference."""
    return config.kl.reference_path or config.model.path


def load_reference(config: Config, spec: ModelSpec, groups: ParallelGroups) -> ReferencePolicy:
    """The frozen reference of the KL term with its weights. Collective.

    Raises ModelError where its shape is not the policy's, because it uses the policy's layout, packs and vocabulary.
    """
    path = reference_path(config)
    other = shape_differences(read_model_spec(path), spec)
    if other:
        raise ModelError(f"kl.reference_path {path} has another shape than the policy: {', '.join(other)}")
    reference = ReferencePolicy(config, spec, groups)
    import_huggingface(path, spec, groups, reference.chunks)
    return reference
