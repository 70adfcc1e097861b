"""Which groups of a step's record are whole."""

from gspo_mega.base.episodes import Group
from gspo_mega.data.journal.steps import StepRecord


def whole_groups(record: StepRecord) -> dict[int, Group]:
    """Those with as many episodes as the record says that a group has, by number."""
    return {number: group for number, group in record.groups.items() if len(group.episodes) == record.group_size}
