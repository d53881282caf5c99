from __future__ import annotations

from benchmarks.timing import StepTime, take_turns


def test_all_take_turns_of_as_many_steps_as_the_fastest_makes_in_half_a_second() -> None:
    seen: list[tuple[str, int]] = []
    times = {"slow": iter((9.0, 0.5, 0.4)), "fast": iter((0.1, 0.2, 0.3))}

    def seconds(name: str, steps: int) -> float:
        seen.append((name, steps))
        return next(times[name])

    result = take_turns({name: lambda steps, name=name: seconds(name, steps) for name in times}, turns=2)  # type: ignore[misc]
    assert {name: time.best for name, time in result.items()} == {"slow": 0.4, "fast": 0.2}
    assert result["slow"] == StepTime.of([0.5, 0.4])
    assert seen == [("slow", 1), ("fast", 1), *[("slow", 5), ("fast", 5)] * 2]
