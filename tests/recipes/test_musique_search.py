"""The multi-turn variant: what `prepare.py --search` writes, and what its tool finds, as verl loads and calls it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from verl.tools.tool_registry import initialize_tools_from_config

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "musique"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(RECIPE))
    for name in ("reward", "search_tool"):  # the other recipe has modules of these names
        monkeypatch.delitem(sys.modules, name, raising=False)
    (found,) = initialize_tools_from_config(RECIPE / "search_tool.yaml")
    yield found
    for name in ("reward", "search_tool"):
        sys.modules.pop(name, None)


def test_rarer_words_count_more_and_what_shares_none_is_not_found(tool):
    search = sys.modules["search_tool"].search
    texts = ["Rome\nThe city lies on the Tiber.", "Oslo\nThe city has a fjord.", "Paris\nThe city lies on the Seine."]
    assert search("Which city lies on the Seine?", texts, 3) == [texts[2], texts[0], texts[1]]
    assert search("Seine, TIBER!", texts, 3) == [texts[0], texts[2]]
    assert search("city", texts, 2) == texts[:2]
    assert search("the a an", texts, 3) == search("", texts, 3) == []


def test_the_tool_searches_the_paragraphs_of_its_own_row(tool, tmp_path):
    questions = tmp_path / "questions.jsonl"
    for command in (
        ["make_questions.py", "--output", questions, "--num", 6, "--seed", 1],
        ["prepare.py", "--input", questions, "--output", tmp_path, "--max-paragraphs", 4, "--search"],
    ):
        subprocess.run([sys.executable, RECIPE / command[0], *map(str, command[1:])], check=True, timeout=300)
    assert tool.name == "search" and tool.tool_schema.function.parameters.required == ["query"]

    async def call(row, query):
        """As verl's ToolAgentLoop._call_tool does."""
        kwargs = row["extra_info"]["tools_kwargs"].get("search", {})
        instance, _ = await tool.create(create_kwargs=kwargs.get("create_kwargs", {}))
        try:
            return (await tool.execute(instance, {"query": query}, agent_data=None))[0].text
        finally:
            await tool.release(instance)

    async def both(rows):
        return await asyncio.gather(*(call(row, paragraphs_of(row)[1].split("\n")[0]) for row in rows))

    def paragraphs_of(row):
        return row["extra_info"]["tools_kwargs"]["search"]["create_kwargs"]["paragraphs"]

    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    for row in rows:
        (message,) = row["prompt"]
        assert message["content"].endswith(row["extra_info"]["question"])
        assert "agent_name" not in row  # the script says which loop, and a row's own name would come first
        assert len(paragraphs_of(row)) == 4 and not any(text in message["content"] for text in paragraphs_of(row))
    for row, found in zip(rows, asyncio.run(both(rows)), strict=True):
        assert found.startswith(paragraphs_of(row)[1])
    assert asyncio.run(call(rows[0], "xyzzy")) == "Nothing is found for 'xyzzy'."
    with pytest.raises(ValueError, match="query=7: pass a text"):
        asyncio.run(call(rows[0], 7))
    with pytest.raises(ValueError, match="carries no paragraphs; write the parquet with .*--search"):
        asyncio.run(call({"extra_info": {"tools_kwargs": {}}}, "Rome"))
    assert not tool.paragraphs
