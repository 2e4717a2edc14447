"""Searched plans beside chance and rules of thumb, for one model on one machine."""

from hmt_bench.plans import Case, cases, compare, content_of, table


def test_chance_and_rules_of_thumb_are_beaten() -> None:
    results = [
        compare(Case("llama-3.1-8b", machine, "latency"), 20)
        for machine in ("16gb-card-gen5", "cpu-server")
    ]
    results.append(compare(Case("deepseek-v3", "h200-16-cores", "latency"), 1))
    content = content_of(results, 20)
    found = content["summary"]
    assert (found["planned"], found["refused"], found["random_plans"]) == (2, 1, 40)
    assert found["least_beaten"] >= 0.95 and found["rules"] == 4 and not found["rules_that_win"]
    assert all(cost >= 1 for cost in results[0]["rules"].values())
    assert results[0] == compare(Case("llama-3.1-8b", "16gb-card-gen5", "latency"), 20)
    rows = {line.split(" | ")[0]: line for line in table(content).splitlines()}
    assert "| 1 | 20 | 100.0% |" in rows["| 16gb-card-gen5"] and "| - | - |" in rows["| cpu-server"]
    assert "| 0 | 0 | - | - |" in rows["| h200-16-cores"] and "| 2 | 40 |" in rows["| all"]
    assert len(cases(["a", "b"], ["c"])) == 4
