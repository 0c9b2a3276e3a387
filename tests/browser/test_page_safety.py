"""Text that wants to be more than text: it is drawn, and does nothing, under a strict content security policy."""

import json
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.async_api import expect
from stand_ins import conversation_of

import chatsvc

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

PAYLOADS = json.loads((Path(chatsvc.__file__).parent / "web" / "test" / "payloads.json").read_text())

WHAT_IS_WRONG = """
() => {
  const faults = [];
  const forbidden = "script, iframe, object, embed, svg, math, form, input, style, link, meta, base, video, details";
  for (const prose of document.querySelectorAll(".prose, .question")) {
    for (const node of prose.querySelectorAll(forbidden)) faults.push(`tag ${node.tagName}`);
    for (const node of prose.querySelectorAll("*")) {
      for (const { name, value } of node.attributes) {
        if (/^(on.*|style|id|name)$/.test(name)) faults.push(`${name}=${value}`);
      }
    }
    for (const link of prose.querySelectorAll("a[href]")) {
      if (!/^(https?|mailto|tel):/.test(link.href)) faults.push(`href ${link.href}`);
      if (link.target !== "_blank" || !link.relList.contains("noopener")) faults.push(`bare link ${link.href}`);
    }
    for (const image of prose.querySelectorAll("img")) {
      if (!/^data:image\\/(png|jpeg|gif|webp|avif);/.test(image.getAttribute("src"))) faults.push(`src ${image.src}`);
    }
  }
  return faults;
}
"""


async def test_hostile_text_is_streamed_and_does_nothing(visit, start_server):
    text = "\n\n".join(PAYLOADS)
    server = start_server(f"scripted:?tokens_per_s=1000&text={quote(text)}")
    tab = await visit(base_url=server.base_url)
    requests = watch_requests(tab)
    await tab.send("\n".join(PAYLOADS[:20]))
    await tab.reply_is("complete", timeout_s=60)
    assert await tab.page.evaluate(WHAT_IS_WRONG) == []
    await click_everything(tab)
    assert await tab.page.evaluate("document.title") != "pwned"
    assert (await tab.stored_reply())["content"] == text.replace("\0", "\ufffd")
    assert [url for url in requests if not url.startswith((server.base_url, "data:"))] == []


async def test_each_hostile_text_alone_does_nothing(visit):
    tab = await visit()
    requests = watch_requests(tab)
    await tab.open("c/" + await conversation_of(tab, [text for payload in PAYLOADS for text in ("?", payload)]))
    await expect(tab.messages.first).to_be_visible()
    for _ in range(40):
        assert await tab.page.evaluate(WHAT_IS_WRONG) == []
        await click_everything(tab)
        top = await tab.page.evaluate("() => (document.querySelector('.viewport').scrollTop -= 600)")
        if top <= 0:
            break
        await tab.page.evaluate(
            "() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))"
        )
    assert top <= 0
    assert [url for url in requests if not url.startswith((tab.base_url, "data:"))] == []


async def test_the_page_is_served_with_a_strict_policy_and_runs_under_it(visit):
    tab = await visit()
    answer = await tab.page.reload()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    blocked = await tab.page.evaluate(
        """() => {
          const image = document.createElement("div");
          image.innerHTML = "<img src=x onerror='window.pwned = 1'>";
          document.body.append(image);
          return new Promise((resolve) => setTimeout(() => resolve(window.pwned === undefined), 300));
        }"""
    )
    assert blocked
    tab.problems.clear()  # the policy's own complaint about what this test tried


def watch_requests(tab):
    urls = []
    tab.page.context.on("request", lambda request: urls.append(request.url))
    return urls


async def click_everything(tab):
    """Links without an address, and what may pose as a button; real links would open other tabs."""
    await tab.page.evaluate(
        """() => {
          for (const node of document.querySelectorAll(".prose *:not(button)")) {
            if (!node.closest("a[href]")) node.dispatchEvent(new MouseEvent("click", { bubbles: true }));
            node.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
            node.dispatchEvent(new Event("error"));
          }
        }"""
    )
