"""format, length, regex, json_schema and choice: what each gives for responses of every kind, and which options are
refused."""

import time

import pytest

from gspo_mega.base.errors import RewardError
from gspo_mega.rewards.functions import VERIFIERS, load_function, problem_of_answer


def given(name, response, answer=None, tokens=0, metadata=None, **options):
    function = load_function(name, options)
    more = {"num_response_tokens": tokens} if name == "length" else {}
    return function(prompt="", response=response, answer=answer, metadata=metadata or {}, **more, **options)


@pytest.mark.parametrize(
    ("response", "options", "value"),
    [
        ("<think>a</think><answer>b</answer>", {}, 1),
        ("\n<think>\na\n</think>\n\n<answer> b </answer>\n", {}, 1),
        ("<think>a</think> so <answer>b</answer>", {}, 0),
        ("<think>a</think><answer>b</answer> yes", {}, 0),
        ("<answer>b</answer><think>a</think>", {}, 0),
        ("<think>a<answer>b</answer></think>", {}, 0),
        ("<think>a<think>c</think><answer>b</answer>", {}, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", {}, 0),
        ("<think> </think><answer>b</answer>", {}, 0),
        ("<think>a</think><answer>b", {}, 0),
        ("</think>a<think><answer>b</answer>", {}, 0),
        ("", {}, 0),
        ("a</think><answer>b</answer>", {"opened": True}, 1),
        ("<think>a</think><answer>b</answer>", {"opened": True}, 0),
        ("a</think><answer>b</answer>", {}, 0),
        ("<plan>x</plan>", {"tags": ["plan"]}, 1),
    ],
)
def test_format(response, options, value):
    assert given("format", response, **options) == value


@pytest.mark.parametrize(
    ("tokens", "value"),
    [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20479, -4095 / 4096), (20480, -1), (90000, -1)],
)
def test_length_is_dapos_formula_with_its_own_numbers(tokens, value):
    assert given("length", "", tokens=tokens, longest=20480, soft=4096) == value


@pytest.mark.parametrize(
    ("response", "options", "value"),
    [
        ("so 42 it is", {"pattern": "[0-9]+"}, 1),
        ("so it is", {"pattern": "[0-9]+"}, 0),
        ("42", {"pattern": "[0-9]+", "full": True}, 1),
        ("42 ", {"pattern": "[0-9]+", "full": True}, 0),
        ("As an AI I", {"pattern": "as an ai", "ignore_case": True, "absent": True}, 0),
        ("Well", {"pattern": "as an ai", "ignore_case": True, "absent": True}, 1),
        ("Answer: 7", {"pattern": r"Answer: (?P<answer>\S+)"}, {"reward": 1, "correct": True}),
        ("Answer: 8", {"pattern": r"Answer: (?P<answer>\S+)"}, {"reward": 0, "correct": False}),
        ("Answer: 8 Answer: 7", {"pattern": r"(?s:.*)Answer: (?P<answer>\S+)"}, {"reward": 1, "correct": True}),
        ("7", {"pattern": r"Answer: (?P<answer>\S+)"}, {"reward": 0, "correct": False}),
        ("é Answer:  7 ", {"pattern": r"Answer:(?P<answer>.*)"}, {"reward": 1, "correct": True}),
    ],
)
def test_regex(response, options, value):
    assert given("regex", response, answer=7, **options) == value


def test_a_pattern_that_takes_python_longer_than_the_universe_takes_linear_time():
    began = time.process_time()
    assert given("regex", "a" * 60_000 + "!", pattern="^(a|a)*(a*)*b$") == 0
    assert given("json_schema", '"' + "a" * 60_000 + '!"', schema={"pattern": "^(a|aa)*(a*)*$"}) == 0
    properties = {"patternProperties": {"^(a|aa)*(a*)*$": {}}, "additionalProperties": False}
    assert given("json_schema", '{"' + "a" * 60_000 + '!": 1}', schema=properties) == 0
    mixed = "[" + ",".join(["{}", "1", '"x"'][i % 3] if i > 9 else f"[{i}]" for i in range(20_000)) + "]"
    assert given("json_schema", mixed, schema={"uniqueItems": True}) == 0
    assert time.process_time() - began < 60  # backtracking: years


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"$ref": "#/$defs/y"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"y": {"type": "number", "minimum": 0}},
}


@pytest.mark.parametrize(
    ("response", "options", "value"),
    [
        ('{"x": 1}', {}, 1),
        (' {"x": 1, "y": 0.5}\n', {}, 1),
        ('{"x": 1, "y": -1}', {}, 0),
        ('{"x": "1"}', {}, 0),
        ('{"x": 1, "z": 1}', {}, 0),
        ('{"x": 1} and more', {}, 0),
        ('{"x": NaN}', {}, 0),
        ("", {}, 0),
        ("[" * 60_000, {}, 0),
        ('{"x": ' + "9" * 60_000 + "}", {}, 0),
        ('Here:\n```json\n{"x": 1}\n```\n', {"fenced": True}, 1),
        ('```\n{"y": 1}\n```\nor\n```\n{"x": 1}\n```', {"fenced": True}, 1),
        ('```json\n{"x": 1}', {"fenced": True}, 0),
        ('{"x": 1}', {"fenced": True}, 0),
        ('```json\n{"x": 1}\n```', {}, 0),
        ('{"x": 7.0}', {"compare": True}, {"reward": 1, "correct": True}),
        ('{"x": 8}', {"compare": True}, {"reward": 0, "correct": False}),
        ("no", {"compare": True}, {"reward": 0, "correct": False}),
    ],
)
def test_json_schema(response, options, value):
    assert given("json_schema", response, answer='{"x": 7}', schema=POINT, **options) == value


def test_json_values_are_compared_as_json():
    schema = {"type": "array", "uniqueItems": True}
    assert given("json_schema", "[1, true, 0, false, {}, []]", schema=schema) == 1
    assert given("json_schema", "[1, 1.0]", schema=schema) == 0
    assert given("json_schema", "[true]", answer=[1], schema=schema, compare=True)["correct"] is False
    below = {"patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert [
        given("json_schema", text, schema=below) for text in ('{"n_a": 1, "b": "x"}', '{"n_a": "x"}', '{"b": 1}')
    ] == [1, 0, 0]


CHOICES = {"choices": ["Paris", "Rome", "Bern", "Prague"]}


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("B", "B", 1),
        ("b", "B", 1),
        ("(B)", "B", 1),
        ("B.", "(B)", 1),
        ("B) Rome", "B", 1),
        (" **B** ", 1, 1),
        ("A", 1, 0),
        ("A", "0", 1),
        ("A is not it. The answer is B", "B", 1),
        ("The answer is B because option A is wrong.", "B", 1),
        ("The answer is A. No: the answer is (B).", "B", 1),
        ("**Answer:** C", "C", 1),
        ("answer: $C$", "C", 1),
        ("The correct choice is option D.", "D", 1),
        ("The answer is A; finally \\boxed{B}", "B", 1),
        ("\\boxed{\\text{B}}", "B", 1),
        ("\\boxed{\\textbf{(B)}}", "B", 1),
        ("\\boxed{Rome}", "B", 1),
        ("\\boxed{rome.}", "B", 1),
        ("\\boxed{Vienna}", "B", 0),
        ("<answer>B</answer>", "B", 1),
        ("<answer> (B) Rome </answer> thanks", "B", 1),
        ("Rome", "B", 1),
        ("The answer is Apples", "A", 0),
        ("The answer is Rome", "B", 1),
        ("The answer is **Rome**.", "B", 1),
        ("The answer is Rome, because Paris is in France.", "B", 1),
        ("The answer is Paris. No, the answer is Rome.", "B", 1),
        ("The answer is Paris. No, the answer is Rome.", "A", 0),
        ("The answer is Romeo", "B", 0),
        ("Answer: rome", "B", 1),
        ("The answer is Prague", "D", 1),
        ("The answer is Vienna", "B", 0),
        ("The answer is not Rome", "B", 0),
        ("\\boxed{Option B}", "B", 1),
        ("\\boxed{\\text{Option B}}", "B", 1),
        ("\\boxed{\\text{(B)}\\ Rome}", "B", 1),
        ("\\boxed{Choice (B)}", "B", 1),
        ("\\boxed{option b}", "B", 1),
        ("\\boxed{The answer is B}", "B", 1),
        ("\\boxed{B: Rome}", "B", 1),
        ("\\boxed{B - Rome}", "B", 1),
        ("\\boxed{Option B: Rome}", "B", 1),
        ("<answer>Option B</answer>", "B", 1),
        ("\\boxed{\uff22}", "B", 1),
        ("\\boxed{Options A and B}", "B", 0),
        ("\\boxed{Option A}", "B", 0),
        ("\\boxed{not B}", "B", 0),
        ("Option B", "B", 1),
        ("I think B and C", "B", 0),
        ("The answer is B or C", "B", 0),
        ("Answer: B and (C)", "B", 0),
        ("Answer: B/C", "B", 0),
        ("The answer is B, not C.", "B", 1),
        ("The answer is I think B", "I", 0),
        ("The answer is A good one", "A", 0),
        ("The answer is A because B is wrong", "A", 1),
        ("### Answer\nB", "B", 1),
        ("Answer:\n\n**B**", "B", 1),
        ("The answer is therefore B.", "B", 1),
        ("The answer must be B.", "B", 1),
        ("The answer is \u201cB\u201d.", "B", 1),
        ("The answer is 'B'", "B", 1),
        ("The answer is B's", "B", 0),
        ("", "A", 0),
        ("A" * 60_000, "A", 0),
    ],
)
def test_choice(response, answer, value):
    assert given("choice", response, answer, metadata=CHOICES) == value


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is A dog", "C"),
        ("The answer is A", "A"),
        ("The answer is a dog and a cat", "D"),
        ("The answer is B", "B"),
    ],
)
def test_the_longest_choice_is_named(response, letter):
    choices = {"choices": ["B", "cat", "a dog", "A dog and a cat"]}
    assert [given("choice", response, one, metadata=choices) for one in "ABCD"] == [
        float(one == letter) for one in "ABCD"
    ]


@pytest.mark.parametrize("answer", [None, "", "Paris", 26, -1, 1.5, True, ["A"], "99"])
def test_an_answer_that_is_no_choice_is_refused_with_the_rows(answer):
    assert "is neither a letter, such as B or (B), nor a position" in (problem_of_answer(answer, ["choice"]) or "")
    with pytest.raises(ValueError, match="neither a letter"):
        given("choice", "A", answer)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("format", {"tags": "think"}, "tags is 'think'; a list of names is expected"),
        ("format", {"tags": []}, "a list of names is expected"),
        ("format", {"tags": ["a b"]}, "a list of names"),
        ("format", {"tags": ["a", "a"]}, "names one twice"),
        ("format", {"tag": ["a"]}, "unexpected keyword argument 'tag'"),
        ("length", {"longest": 10}, "missing a required argument: 'soft'"),
        ("length", {"longest": 10.5, "soft": 1}, "longest is 10.5; a number of tokens"),
        ("length", {"longest": 10, "soft": 0}, "soft is 0; a number of tokens"),
        ("length", {"longest": 10, "soft": 11}, "soft is 11; at most longest, 10"),
        ("length", {"longest": 10, "soft": 1, "num_response_tokens": 3}, "an argument that every reward gets"),
        ("regex", {"pattern": 3}, "pattern is 3; a text"),
        ("regex", {"pattern": "(a"}, "no pattern of RE2: missing .: .a"),
        ("regex", {"pattern": "(?=a)"}, "invalid perl operator.*no look-around"),
        ("regex", {"pattern": "(?P<answer>.)", "absent": True}, "absent contradicts"),
        ("json_schema", {"schema": "x"}, "schema is 'x'; a JSON Schema"),
        ("json_schema", {"schema": {"type": "objekt"}}, "no JSON Schema: at type"),
        ("json_schema", {"schema": {"pattern": "(?=a)"}}, "no look-around"),
        ("json_schema", {"schema": {"patternProperties": {"(?!a)": {}}}}, "no look-around"),
        ("json_schema", {"schema": {"$ref": "#/$defs/a"}}, "'#/.defs/a' is not in the schema"),
        ("json_schema", {"schema": {"items": {"$ref": "http://x.example/a"}}}, "nothing is fetched"),
        ("json_schema", {"schema": {"patternProperties": {}, "unevaluatedProperties": False}}, "is not read"),
    ],
)
def test_options_are_refused_before_a_run(name, options, said):
    with pytest.raises(RewardError, match=said):
        load_function(name, options)


def test_what_looks_at_the_shape_says_nothing_of_right_and_wrong():
    assert VERIFIERS.isdisjoint({"format", "length", "regex", "json_schema"})
