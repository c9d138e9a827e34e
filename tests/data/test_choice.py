from __future__ import annotations

from latte_convert.data.choice import choose


def test_a_choice_keeps_the_order_and_does_not_depend_on_the_others():
    names = [f"{i:02}" for i in range(30)]
    some = choose(names, 10, 0, str)
    assert len(some) == 10
    assert some == sorted(some)
    assert choose(names, 10, 1, str) != some
    assert set(choose([n for n in names if n in some or n < "10"], 10, 0, str)) <= {*some, *names[:10]}
    assert choose(names, None, 0, str) == names
    assert choose(names, 30, 0, str) == names
