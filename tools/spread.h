/* spread.h - where the contexts of a text lie.
 *
 * A text is cut into equal parts. Contexts are numbered across the parts: the first context of each
 * part, then the second of each. So a few contexts count a text from its beginning to its end, and
 * later numbers are other tokens. With one part, contexts follow each other from the beginning.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { SPREAD_MAX_PARTS = 256 };

/* Whole contexts of n_ctx tokens that a text of n_tokens has. */
static inline size_t spread_count(size_t n_tokens, uint32_t n_parts, size_t n_ctx)
{
    return n_tokens / n_parts / n_ctx * n_parts;
}

/* The first token of a context. */
static inline size_t spread_at(size_t n_tokens, uint32_t n_parts, size_t n_ctx, size_t context)
{
    return n_tokens / n_parts * (context % n_parts) + context / n_parts * n_ctx;
}
