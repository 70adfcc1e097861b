"""The verdict: what is said at which sizes, what is recommended, and that nothing is said that the errors do not allow."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from run_configs import make_config

from gspo_mega.config.clip_range import band_of
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.verify.mismatch.attribution import TokenPlaces, explained_share, make_row
from gspo_mega.verify.mismatch.causes import CHUNK, ENGINES, PREFIX_CACHE, R3, Facts, Nothing
from gspo_mega.verify.mismatch.faults import EngineFault
from gspo_mega.verify.mismatch.findings import CauseRow, Findings, Other, _k3_change, advise
from gspo_mega.verify.mismatch.run import as_json, render

PROMPTS, EACH, LENGTH = 30, 4, 50
SEQUENCE, PROMPT = np.repeat(np.arange(PROMPTS * EACH), LENGTH), np.repeat(np.arange(PROMPTS), EACH)
TOKENS = TokenPlaces(SEQUENCE, PROMPT, np.tile([-1, 1], PROMPTS * EACH // 2))
MADE = {"date": "2026-01-01T00:00:00+00:00", "seconds": 1.5}
LENGTHS = (5, 16, 50)


def facts(model="configs/models/quickstart_moe.json", **sections):
    return Facts(make_config(**sections), read_model_spec(model), "cpu")


def noise(kl, seed=0):
    """Token noise as two engines have it: mean -KL under the rollout policy, standard deviation sqrt(2 KL)."""
    return np.random.default_rng(seed).normal(-kl, np.sqrt(2 * kl), len(TOKENS.sequence))


def findings(run, parts, alternatives=(), nothing=(), faults=(), backward=None, tokens=TOKENS, blocks=None):
    band, d = band_of(run.config.algorithm, run.config.objective), sum(parts.values())
    groups = tokens.prompt[tokens.sequence]

    def share(x):
        return explained_share(x, d, groups)

    def rows(values):
        return {name: CauseRow(make_row(x, tokens, band, LENGTHS), share(x)) for name, x in values.items()}

    return Findings(
        num_prompts=PROMPTS,
        num_sequences=PROMPTS * EACH,
        num_tokens=len(d),
        num_negative=int((tokens.signs < 0).sum()),
        num_positive=int((tokens.signs > 0).sum()),
        unsigned=None if tokens.signs.any() else "nobody scored them",
        lengths=LENGTHS,
        band=band,
        total=make_row(d, tokens, band, LENGTHS),
        parts={"forward": rows(parts), "backward": rows(backward or parts)},
        bounds=dict.fromkeys(parts, 0.25),
        moved={name: share(x - parts[name]) for name, x in (backward or {}).items()},
        nothing=dict(nothing),
        alternatives={
            name: Other(
                {"moe.routing_replay": "R3"} if name == R3 else {CHUNK: 16},
                make_row(x, tokens, band, LENGTHS),
                _k3_change(x if name == R3 else d + x, d, tokens),
                is_change=name != R3,
            )
            for name, x in alternatives
        },
        faults=tuple(faults),
        blocks=blocks,
    )


def said(advice):
    return "\n".join(advice.sentences)


def test_a_gap_of_fp8_size_is_to_be_recomputed():
    run = facts()
    advice = advise(run, findings(run, {"server weights": noise(4.5e-3), ENGINES: noise(1e-9, 1)}))
    assert "would clip" in said(advice) and "A < 0" in said(advice) and "recompute them" in said(advice)
    assert advice.keys["old_log_probs"][0] == "trainer"
    assert "server weights 100 % +- 0" in said(advice)
    # As mismatch_report.py does: at the first step, and again after many.
    assert "a run will note it, once and then rarely" in said(advice)


def test_the_shares_are_those_of_the_signs_of_a():
    """Wrong responses are below the range, right ones inside: of all half are below."""
    run = facts()
    d = np.where(TOKENS.signs[TOKENS.sequence] < 0, -1e-2, 1e-5)
    found = findings(run, {ENGINES: d})
    assert (
        "would clip 100 % +- 6 of the sequences with A < 0 and 0 % +- 6 of those with A > 0, with no update at all (from"
        " 60 responses with A < 0 and 60 with A > 0; of all, 50 % +- 9 below the range, 0 % +- 6 above it)"
    ) in said(advise(run, found))
    shown = render(found, advise(run, found))
    assert "60 sequences have A < 0, 60 have A > 0" in shown
    first, second = (line.split() for line in shown.splitlines() if line.startswith("all together "))
    assert [word.partition("%")[0] for word in first if "%" in word][:2] == ["100", "0"]
    assert [word.partition("%")[0] for word in second if "%" in word] == ["50", "0"]


def test_a_gap_that_clips_nobody_of_its_sign_need_not_be_recomputed():
    """All responses below the range have A > 0, where nothing is clipped; many prompts say so."""
    run = facts()
    count = 400
    tokens = TokenPlaces(np.repeat(np.arange(count), 5), np.arange(count) // 2, np.tile([-1, 1], count // 2))
    d = np.where(tokens.signs[tokens.sequence] > 0, -1e-2, 1e-5)
    text = said(advise(run, findings(run, {ENGINES: d}, tokens=tokens)))
    assert "the clip range can bear that" in text and "recompute" not in text


def test_few_responses_of_a_sign_are_helped_by_all_of_them():
    run = facts()
    signs = np.zeros(PROMPTS * EACH, int)
    signs[:2] = -1, 1
    tokens = TokenPlaces(SEQUENCE, PROMPT, signs)
    d = np.where(np.arange(PROMPTS * EACH)[SEQUENCE] % 2 == 0, -1e-2, 1e-5)
    advice = advise(run, findings(run, {ENGINES: d}, tokens=tokens))
    assert "from 1 responses with A < 0" in said(advice) and "recompute them" in said(advice)


def test_shares_of_all_are_called_that():
    run = facts()
    found = findings(run, {ENGINES: noise(4.5e-3)}, tokens=TokenPlaces(SEQUENCE, PROMPT, 0 * TOKENS.signs))
    advice = advise(run, found)
    assert "(if A has no part in it; the shares are those of all, because nobody scored them)" in said(advice)
    assert "A<0 and A>0 are those of all responses: nobody scored them" in render(found, advice)


def test_rounding_can_be_borne_and_nothing_is_recommended():
    run = facts()
    advice = advise(run, findings(run, {ENGINES: noise(1e-13)}))
    assert "the clip range can bear that" in said(advice) and "recompute them" not in said(advice)
    assert "rounding far below the clip range" in said(advice)
    assert advice.keys == {}


def test_too_few_sequences_decide_nothing():
    # Three of four sequences inside, two prompts: 0.25 +- 0.25.
    run = facts()
    tokens = TokenPlaces(np.repeat(np.arange(4), LENGTH), np.array([0, 0, 1, 1]), np.zeros(4, int))
    d = np.where(tokens.sequence == 0, -1e-2, 0.0)
    advice = advise(run, findings(run, {ENGINES: d}, tokens=tokens))
    assert "do not tell" in said(advice) and "budget.num_prompts" in said(advice)
    assert advice.keys["old_log_probs"] == ("trainer", "safe where it is not known")


def test_r3_is_recommended_where_it_takes_the_routing_part_away():
    run = facts()
    plain, routing = noise(1e-4), noise(1e-3, 1)
    advice = advise(run, findings(run, {"trainer precision": plain, ENGINES: routing}, [(R3, plain)]))
    assert "With R3 the routing part falls from" in said(advice)
    assert advice.keys["moe.routing_replay"][0] == "R3" and advice.keys["rollout.return_routed_experts"][0] is True
    block = yaml.safe_load(advice.yaml)
    assert block["moe"] == {"routing_replay": "R3"} and block["rollout"] == {"return_routed_experts": True}
    assert block["old_log_probs"] == "trainer"


def test_r3_is_not_recommended_where_it_shows_nothing():
    run = facts()
    d = noise(1e-3)
    advice = advise(run, findings(run, {ENGINES: d}, [(R3, d + noise(1e-9, 1))]))
    assert "makes no difference that these prompts can show" in said(advice)
    assert "moe.routing_replay" not in advice.keys


def test_a_cache_that_a_user_can_do_without_is_named_with_its_key():
    run = facts(server=dict(kv_cache="fp8"))
    advice = advise(run, findings(run, {"server KV cache": noise(5e-3), ENGINES: noise(1e-7, 1)}))
    assert advice.keys["server.kv_cache"][0] == "auto"
    assert "100 % +- 0" in advice.keys["server.kv_cache"][1]


def test_causes_that_act_on_each_other_are_said_to():
    run = facts()
    one, other = noise(1e-3), noise(1e-3, 1)
    advice = advise(
        run, findings(run, {"server KV cache": one, ENGINES: other}, backward={"server KV cache": other, ENGINES: one})
    )
    assert "act on each other" not in said(advice)  # both have half of it in both orders
    both = {"server KV cache": one + other, ENGINES: 0 * one}
    advice = advise(run, findings(run, {"server KV cache": one, ENGINES: other}, backward=both))
    assert "act on each other" in said(advice)


def test_a_share_that_one_prompt_makes_is_neither_named_nor_mended():
    run = facts(server=dict(kv_cache="fp8"))
    one = np.where(TOKENS.prompt[TOKENS.sequence] == 0, 6.0, 0.0) * noise(5e-3)
    found = findings(run, {"server KV cache": one, ENGINES: noise(5e-3, 1)})
    share = found.parts["forward"]["server KV cache"].share
    assert share.value > 0.3 and share.error > share.value / 2
    advice = advise(run, found)
    assert "Of the squared mismatch: server KV cache" not in said(advice)
    assert f"{PROMPTS} prompts do not tell whether it is a tenth of the squared mismatch: server KV cache" in said(
        advice
    )
    assert "server.kv_cache" not in advice.keys


def test_an_order_that_one_prompt_moves_is_not_called_an_interaction():
    run = facts()
    one = np.where(TOKENS.prompt[TOKENS.sequence] == 0, 6.0, 0.0) * noise(5e-3)
    kept, moved = noise(5e-3, 1), one + noise(1e-5, 2)
    parts = {"server KV cache": kept, ENGINES: moved}
    advice = advise(run, findings(run, parts, backward={"server KV cache": kept + one, ENGINES: moved - one}))
    assert "act on each other" not in said(advice)


def test_blocks_that_differ_are_named_beside_the_weights():
    run = facts(precision="fp8", server=dict(quantization="fp8_block"))
    parts = {"server weights": noise(4e-3), "trainer FP8": noise(4e-3, 1)}
    why = "Megatron interleaves q, k and v"
    names = [f"model.layers.{layer}.self_attn.{role}_proj.weight" for layer in range(3) for role in "qk"]
    differs = advise(run, findings(run, parts, blocks=dict.fromkeys(names, why)))
    text = (
        "Part of `server weights` and `trainer FP8`: other blocks of 128 x 128 in the trainer than in the servers, in"
        " model.layers.*.self_attn.k_proj.weight (3), model.layers.*.self_attn.q_proj.weight (3):"
        " Megatron interleaves q, k and v."
    )
    assert text in differs.sentences
    same = said(advise(run, findings(run, parts, blocks={})))
    assert "The blocks of all quantized weights coincide" in same
    assert "blocks" not in said(advise(facts(), findings(facts(), parts)))


def test_what_cannot_be_seen_as_a_fault_is_said():
    run = facts()
    found = findings(run, {PREFIX_CACHE: noise(1e-4), ENGINES: noise(1e-9, 1)})
    found.bounds.update({PREFIX_CACHE: 0.17, ENGINES: 3.5e-6})
    advice = advise(run, found)
    assert (
        "No fault is seen below these differences of a token, in nats: 0.17 in `prefix cache`, 3.5e-06 in `between the"
        " engines`." in said(advice)
    )
    lines = render(found, advice).splitlines()
    assert next(line for line in lines if line.startswith("cause ")).split()[-3] == "bound"
    assert next(line for line in lines if line.startswith(PREFIX_CACHE + " ")).split().count("1.7e-01") == 1
    assert as_json(found, advice, MADE)["bounds"] == {PREFIX_CACHE: 0.17, ENGINES: 3.5e-6}


def test_what_cannot_be_changed_is_named_beside_the_engines():
    run = facts()
    hidden = {"trainer LM head": Nothing("no key", False), "server KV cache": Nothing("auto", True)}
    found = findings(run, {ENGINES: noise(1e-3)}, nothing=hidden)
    assert "contains what cannot be changed here: trainer LM head." in said(advise(run, found))
    shown = render(found, advise(run, found))
    assert "not changed here, so in the rows beside it:\n  trainer LM head: no key" in shown
    assert "nothing to change: server KV cache (auto)" in shown


def test_a_fault_comes_first_and_is_not_called_precision():
    run = facts()
    fault = EngineFault("cache", PREFIX_CACHE, "the cache is stale")
    advice = advise(run, findings(run, {ENGINES: noise(1e-13)}, faults=[fault]))
    assert advice.sentences[0] == "NOT PRECISION (cache, found in `prefix cache`): the cache is stale"
    assert "can bear that" not in said(advice)


def test_where_the_rounding_of_states_is_found_is_said():
    delta = "configs/models/certify_qwen3_next.json"
    run = facts(delta, server=dict(options=dict(mamba_ssm_dtype="bfloat16")))
    assert "to bfloat16 after every sampled token" in said(advise(run, findings(run, {ENGINES: noise(1e-6)})))
    plain = facts(delta)
    assert "after every sampled token" not in said(advise(plain, findings(plain, {ENGINES: noise(1e-6)})))


def test_tokens_are_counted_where_tokens_are_clipped():
    run = facts(algorithm="grpo", objective=dict(clip_low=0.2, clip_high=0.27))
    found = findings(run, {ENGINES: noise(1e-3)})
    assert found.band.per_token and found.band.low == pytest.approx(np.log(0.8))
    assert "of the tokens with A < 0" in said(advise(run, found))


def test_the_table_has_a_row_of_each_cause_and_the_object_is_json():
    run = facts()
    others = [(R3, noise(1e-3)), ("chunks of 16", noise(1e-8, 2))]
    found = findings(run, {"server KV cache": noise(1e-3), ENGINES: noise(1e-9, 1)}, others)
    advice = advise(run, found)
    lines = render(found, advice).splitlines()
    for name in ("server KV cache", ENGINES, "all together", "with moe.routing_replay=R3", f"change by {others[1][0]}"):
        assert sum(line.startswith(name + " ") for line in lines) == 2, name
    assert max(map(len, lines[: lines.index("verdict")])) <= 140
    largest = max(abs(others[1][1]))
    assert f"at most {largest:.1e} nats in chunks of 16" in said(advice)
    values = json.loads(json.dumps(as_json(found, advice, MADE), allow_nan=False))
    assert values["made"] == MADE
    assert values["parts"]["forward"]["server KV cache"]["row"]["k3"]["value"] == pytest.approx(1e-3, rel=0.1)
    assert values["recommended"] == {"old_log_probs": "trainer"}
