import json
from pathlib import Path

import pytest

from gspo_mega.config import load_config, render_config, render_json_schema
from gspo_mega.config.strict_yaml import parse
from gspo_mega.plan import plan_run, render_report

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
COMMANDS = {
    "quickstart_sft.yaml": "sft",
    "quickstart_fp8_sft.yaml": "sft",
    "quickstart_ppo_sft.yaml": "sft",
    "calculator_sft.yaml": "sft",
    **{path.name: "certify" for path in SHIPPED if path.name.startswith("certify_")},
}


def test_there_are_some():
    assert {"quickstart.yaml", "quickstart_sft.yaml", "gsm8k.yaml"} <= {path.name for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_configuration_loads_and_plans(path, tmp_path):
    loaded = load_config(path, (), COMMANDS.get(path.name, "train"))
    if path.name.startswith("certify"):
        plan = plan_run(loaded, "cpu")
        assert plan.layout.world_size == 1, "each case brings its own ranks"
    elif loaded.config.cluster.gpu is not None:
        cluster, world = loaded.config.cluster, plan_run(loaded, "gpu").layout.world_size
        assert world == cluster.num_nodes * cluster.ranks_per_node and (world == 1) == path.stem.endswith("_1gpu")
    elif path.name.startswith("quickstart_fp8"):
        plan = plan_run(loaded, "cpu", CONFIGS / "models" / "quickstart_wide.json")
        assert plan.layout.world_size == 1 and "hidden 256, 2 heads x 128" in render_report(plan)
    elif path.name.startswith("calculator"):
        plan = plan_run(loaded, "cpu", CONFIGS / "models" / "quickstart_dense.json")
        assert plan.layout.world_size == plan.layout.data == 2 and "longest sequence 160" in render_report(plan)
    elif path.name.startswith("smollm2"):
        plan = plan_run(loaded, "cpu", CONFIGS / "models" / "smollm2_135m.json")
        assert plan.layout.world_size == plan.layout.data == 2 and "135 M parameters" in render_report(plan)
    else:
        plan = plan_run(loaded, "cpu", CONFIGS / "models" / "quickstart_moe.json")
        assert plan.layout.world_size == 2 and plan.layout.expert == 2
        assert "2 = 1 node x 2" in render_report(plan)
    if loaded.config.train is not None:
        assert loaded.config.checkpoint.every_steps > 0, "a killed run goes on from what was saved"
    resolved = tmp_path / "config.resolved.yaml"
    resolved.write_text(render_config(loaded.config))
    again = load_config(resolved, (), COMMANDS.get(path.name, "train"))
    assert again.config == loaded.config and again.notices == loaded.notices


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_configuration_fits_the_json_schema_it_names(path):
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    schema = json.loads((CONFIGS / "schema.json").read_text())
    assert list(misfits(parse(text).value, schema, schema)) == []
    wrong = (
        text + "\nalgoritm: gspo\nmetrics: {tensorbord: 1}\ncheckpoint2: {}\ndiagnostics: {exact_staleness: maybe}\n"
    )
    assert len(list(misfits(parse(wrong).value, schema, schema))) == 4


def misfits(value, schema, root):
    """What an editor would underline: the part of JSON Schema that pydantic writes for these sections."""
    if "$ref" in schema:
        yield from misfits(value, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    elif "anyOf" in schema:
        attempts = [list(misfits(value, option, root)) for option in schema["anyOf"]]
        yield from min(attempts, key=len)
    elif schema.get("type") == "object" and isinstance(value, dict):
        yield from (f"missing {key}" for key in schema.get("required", ()) if key not in value)
        for key, inner in value.items():
            if key in schema.get("properties", {}):
                yield from misfits(inner, schema["properties"][key], root)
            elif schema.get("additionalProperties") is False:
                yield f"unknown {key}"
    elif schema.get("type") == "array" and isinstance(value, list):
        for inner in value:
            yield from misfits(inner, schema["items"], root)
    else:
        types = {
            "string": str,
            "integer": int,
            "number": (int, float),
            "boolean": bool,
            "null": type(None),
            "object": dict,
            "array": list,
        }
        if "type" in schema and not isinstance(value, types[schema["type"]]):
            yield f"{value!r} is not {schema['type']}"
        if "enum" in schema and value not in schema["enum"]:
            yield f"{value!r} is not one of {schema['enum']}"


def test_the_committed_json_schema_is_current():
    committed = (CONFIGS / "schema.json").read_text()
    assert committed == render_json_schema(), "run: gspo-mega plan --json-schema > configs/schema.json"


def test_only_the_quickstarts_widen_the_clip_range_and_say_so():
    noticed = {
        path.name: [n for n in load_config(path, (), COMMANDS.get(path.name, "train")).notices if "clip range" in n]
        for path in SHIPPED
    }
    assert noticed["gsm8k.yaml"] == [] and noticed["quickstart_sft.yaml"] == []
    quickstarts = {f"quickstart{kind}.yaml" for kind in ("", "_distill", "_fp8", "_lora")} | {
        "calculator.yaml",
        "smollm2_json.yaml",
    }
    assert {name for name, notices in noticed.items() if notices and not name.startswith("certify")} == quickstarts
    for name in quickstarts:
        whose = "gspo_token" if name == "quickstart_distill.yaml" else "gspo"
        assert noticed[name] == [f"clip range 0.003 / 0.004 instead of 0.0003 / 0.0004, the published one of {whose}"]
        assert "does not transfer" in (CONFIGS / name).read_text()


def test_gsm8k_takes_a_file_by_override_alone():
    loaded = load_config(CONFIGS / "gsm8k.yaml", ["data.path=elsewhere/problems.jsonl"], "train")
    assert loaded.config.data.path == "elsewhere/problems.jsonl" and loaded.config.eval is None
