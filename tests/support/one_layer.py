"""A model of one dense layer with sizes small enough to compute by hand."""

from gspo_mega.models.spec import ModelSpec

ONE_LAYER = ModelSpec(
    family="qwen3",
    num_layers=1,
    hidden_size=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    intermediate_size=1,
    vocab_size=8,
    max_position_embeddings=16,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    torch_dtype="float32",
    eos_token_ids=(1,),
)
