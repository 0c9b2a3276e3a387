// Which addresses a reply may link to. Pure; the browser's own parser decides what an address means.

const LINK_SCHEMES = new Set(["http:", "https:", "mailto:", "tel:"]);
const RASTER = /^data:image\/(?:png|jpeg|gif|webp|avif);base64,[a-z0-9+/=\s]+$/i;

/**
 * The address a link may have, or null. Only absolute addresses with a harmless scheme: a relative one would lead into
 * this very service, which a model's text has no business with.
 */
export function linkTarget(href: string): string | null {
  let url: URL;
  try {
    url = new URL(href);
  } catch {
    return null; // relative, or no address at all
  }
  return LINK_SCHEMES.has(url.protocol) ? url.href : null;
}

/** The address an image may be loaded from without telling anybody: pixels that are in the text itself. */
export function imageSource(src: string): string | null {
  return RASTER.test(src) ? src : null;
}
