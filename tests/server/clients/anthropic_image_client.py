"""A question about an image: https://platform.claude.com/docs/en/build-with-claude/vision."""

import base64
import sys
from pathlib import Path

from anthropic import Anthropic
from given import MODEL, WHAT

data = base64.b64encode(Path(sys.argv[3]).read_bytes()).decode()
source = {"type": "base64", "media_type": "image/jpeg", "data": data}
content: list = [{"type": "image", "source": source}, {"type": "text", "text": WHAT}]
done = Anthropic(max_retries=0).messages.create(
    model=MODEL, max_tokens=6, messages=[{"role": "user", "content": content}],
    extra_body={"temperature": 0},
)  # fmt: skip
print(done.content[0].text)
