"""A question about an image: https://docs.langchain.com/oss/python/langchain/messages."""

import base64
import sys
from pathlib import Path

from given import MODEL, OPENAI, WHAT
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

data = base64.b64encode(Path(sys.argv[3]).read_bytes()).decode()
image = {"type": "image", "base64": data, "mime_type": "image/jpeg"}
chat = ChatOpenAI(
    model=MODEL, base_url=OPENAI, api_key="none", max_retries=0, temperature=0, max_tokens=6
)
print(chat.invoke([HumanMessage([image, {"type": "text", "text": WHAT}])]).content)
