/* search_cases.c - see search_cases.h. */
#include "search_cases.h"

#include "../../../src/base/random.h"
#include "../../../src/codec/trellis_book.h"
#include "../../../src/kernels/kernels.h"
#include "../../unit/testing.h"

static uint64_t state = 1;

/* A number that is approximately normal. */
static float random_number(void)
{
    float sum = -6;
    for (int i = 0; i < 12; i++)
        sum += (float)(kvant_splitmix64(&state) >> 40) * 0x1p-24f;
    return sum;
}

/* Normal numbers, and rows with large costs: random spikes, only spikes, or some neighbouring
 * steps. */
static int cell_of_number(int kind, uint32_t step)
{
    const float x = random_number();
    const bool spike = kind == 1   ? kvant_splitmix64(&state) % 16 == 0
                       : kind == 2 ? true
                       : kind == 3 ? step / 8 % 4 == 1
                       : kind == 4 ? kvant_splitmix64(&state) % 3 == 0
                                   : false;
    const float limit = (float)KVANT_TRELLIS_CELLS / 2, cell = 64 * x *
                                                               (spike       ? 8
                                                                : kind == 5 ? 0
                                                                            : 1);
    return (int)fmaxf(-limit, fminf(limit - 1, rintf(cell))) + (int)limit;
}

void search_case_make(uint32_t bits, uint32_t steps, int i, search_case *c)
{
    char spec[16];
    snprintf(spec, sizeof spec, "trellis-%u", bits);
    kvant_codec *codec = make_codec(spec, 128, KVANT_ROLE_V);
    const kvant_trellis *trellis = &kvant_trellis_book_of(codec)->trellis;
    memset(c, 0, sizeof *c);
    c->kind = i % 6;
    c->bits = bits;
    c->n_levels = 4u << bits;
    c->per_deviation = (int32_t)lrintf(1 / kvant_trellis_book_of(codec)->unit);
    memcpy(c->levels, trellis->levels, c->n_levels);
    for (uint32_t step = 0; step < steps; step++)
        c->cells[step] = (uint16_t)cell_of_number(c->kind, step);
    kvant_trellis_path_c(trellis, c->cells, steps, c->bit);
    kvant_trellis_subsets(c->bit, steps, c->subset);
    for (uint32_t step = 0; step < steps; step++)
        c->nearest[step] = trellis->nearest[c->cells[step]][c->subset[step]];
    kvant_codec_free(&codec);
}
