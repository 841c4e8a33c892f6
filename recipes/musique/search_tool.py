"""Search over one question's paragraphs, for verl's own tool agent: a tool without a server.

Every trajectory searches the paragraphs that its row carries (`prepare.py --search`). What it finds is in the response,
and verl masks it: the model reads it and is not trained on it.
"""

import math
from collections import Counter
from typing import Any
from uuid import uuid4

from reward import normalize
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


def search(query: str, paragraphs: list[str], most: int) -> list[str]:
    """Return what shares words with the query, the best `most`; rare words count more, and ties keep their order."""
    words = [set(normalize(text).split()) for text in paragraphs]
    holds = Counter(word for found in words for word in found)
    wanted = set(normalize(query).split())
    scores = [sum(math.log(1 + len(words) / holds[word]) for word in wanted & found) for found in words]
    order = sorted(range(len(words)), key=lambda i: -scores[i])
    return [paragraphs[i] for i in order[:most] if scores[i] > 0]


class SearchTool(BaseTool):
    """`search` as verl calls it; `config.most` of search_tool.yaml is the number of paragraphs it returns."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.paragraphs: dict[str, list[str]] = {}  # by trajectory

    async def create(
        self, instance_id: str | None = None, create_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if not create_kwargs or "paragraphs" not in create_kwargs:
            raise ValueError(
                "the row carries no paragraphs; write the parquet with recipes/musique/prepare.py --search"
            )
        instance_id = instance_id or uuid4().hex
        self.paragraphs[instance_id] = list(create_kwargs["paragraphs"])
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """What the model reads; it reads an error's text too, and may search again."""
        query = parameters.get("query")
        if not isinstance(query, str):
            raise ValueError(f"query={query!r}: pass a text")
        found = search(query, self.paragraphs[instance_id], self.config["most"])
        return ToolResponse(text="\n\n".join(found) or f"Nothing is found for {query!r}."), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.paragraphs[instance_id]
