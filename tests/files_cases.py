"""Wrong values for any place in a file of JSON."""

import copy
from functools import reduce
from operator import getitem

WRONG = [None, True, -1, 2.5, 10**30, "\x1b[2J", [], [[]], {}, {"a": 1}]


def changed_anywhere(data, value):
    """Yield copies of plain data with the value at each place in turn.

    Of long lists only the first and the last entry are replaced.
    """
    for place in _places(data):
        changed = copy.deepcopy(data)
        reduce(getitem, place[:-1], changed)[place[-1]] = value
        yield changed


def _places(data, above=()):
    ends = () if isinstance(data, dict) or not data else {0, len(data) - 1}
    for key in data if isinstance(data, dict) else ends:
        yield (*above, key)
        if isinstance(data[key], dict | list):
            yield from _places(data[key], (*above, key))
