"""JSON values are copied whole, and what is no JSON value is copied too."""

import copy

from gspo_mega.data.rows import copied


def test_a_copy_equals_the_value_and_shares_no_container_with_it():
    value = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, 1, 2.5, True, None],
        "calls": [],
        "pair": ([1],),
    }
    made = copied(value)
    assert made == value == copy.deepcopy(value)
    made["content"][0]["text"] = "b"
    made["calls"].append(1)
    made["pair"][0].append(2)
    assert value["content"][0]["text"] == "a" and value["calls"] == [] and value["pair"] == ([1],)


def test_other_types_are_copied_as_deepcopy_does():
    class Own(dict):
        pass

    value = {"own": Own(inner=[1])}
    made = copied(value)
    assert type(made["own"]) is Own and made == value and made["own"]["inner"] is not value["own"]["inner"]
