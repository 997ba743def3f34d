/* book.c - see book.h. */
#include "book.h"

/* The positive levels; the negative ones mirror them. */
static const struct {
    uint8_t levels[8];
    float step;
} books[5] = {
    [1] = { { 1 }, 0.79788456f },
    [2] = { { 3, 10 }, 0.15104176f },
    [3] = { { 3, 9, 16, 26 }, 0.08309821f },
    [4] = { { 3, 9, 15, 21, 28, 36, 46, 61 }, 0.04479655f },
};

#define WHOLE_STEP 0.03125f /* 8 bits: a level is code - 128, and 127 levels reach 4 */

static void init_whole(kvant_book *book)
{
    book->format.bias = 128;
    book->step = WHOLE_STEP;
    for (int32_t code = 0; code < 256; code++)
        book->values[code] = (float)(code - 128);
}

void kvant_book_init(kvant_book *book, uint32_t bits, uint32_t dim)
{
    *book = (kvant_book){ .format = { .bits = bits, .n_quads = kvant_pack_quads(dim, bits) } };
    if (bits == 8) {
        init_whole(book);
        return;
    }
    const uint32_t half = 1u << (bits - 1);
    book->step = books[bits].step;
    book->format.bias = books[bits].levels[half - 1];
    for (uint32_t i = 0; i < half; i++) {
        book->format.levels[half + i] = (int8_t)books[bits].levels[i];
        book->format.levels[half - 1 - i] = (int8_t)-books[bits].levels[i];
    }
    for (uint32_t i = 0; i < 2 * half; i++)
        book->values[i] = book->format.levels[i];
    for (uint32_t i = 0; i + 1 < 2 * half; i++)
        book->thresholds[i] = (book->values[i] + book->values[i + 1]) / 2;
}

void kvant_book_encode(const kvant_book *book, const kvant_kernels *kernels, const float *x, uint32_t n,
                       float inverse, uint8_t *codes)
{
    const kvant_uniform_step whole = { .inverse = inverse, .low = -127, .high = 127, .offset = -128 };
    if (book->format.bits == 8)
        kernels->uniform_codes(x, n, &whole, codes);
    else
        kernels->codebook_codes(x, n, inverse, book->thresholds, book->format.bits, codes);
}
