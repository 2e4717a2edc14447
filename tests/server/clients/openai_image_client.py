"""A question about an image: https://developers.openai.com/api/docs/guides/images-vision."""

import base64
import sys
from pathlib import Path

from given import MODEL, WHAT
from openai import OpenAI

data = base64.b64encode(Path(sys.argv[3]).read_bytes()).decode()
image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
message: dict = {"role": "user", "content": [image, {"type": "text", "text": WHAT}]}
done = OpenAI(max_retries=0).chat.completions.create(
    model=MODEL, messages=[message], temperature=0, max_tokens=6
)
print(done.choices[0].message.content)
