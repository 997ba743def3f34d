/* check_trellis.c - trellis codes: the trellis search finds the same path at every level, and
 * products of levels and integers are exact. */
#include "../../src/codec/trellis_book.h"
#include "check.h"

typedef enum cost_kind { ANY_COSTS, LARGEST_COSTS, TIES, N_COST_KINDS } cost_kind;

/* Makes a trellis that comes from no codec's book: the search has to work with any table of
 * costs. */
static kvant_trellis *make_trellis(checker *check, cost_kind kind)
{
    kvant_trellis *trellis = check_input(check, "trellis", sizeof *trellis, 64);
    memset(trellis, 0, sizeof *trellis);
    trellis->bits = 4;
    for (uint32_t cell = 0; cell < KVANT_TRELLIS_CELLS; cell++)
        for (uint32_t z = 0; z < KVANT_TRELLIS_SUBSETS; z++)
            trellis->costs[cell][z] =
                (uint16_t)(kind == LARGEST_COSTS ? KVANT_TRELLIS_MAX_COST - check_below(check, 2)
                           : kind == TIES        ? check_below(check, 3)
                                                 : check_below(check, 1u << cell % 13));
    return trellis;
}

/* Some circular paths have steps without a number: few of them, or all. */
static uint16_t *make_cells(checker *check, uint32_t n)
{
    uint16_t *cells = check_input(check, "cells", n * sizeof *cells, sizeof *cells);
    const uint32_t without = check_below(check, 8);
    for (uint32_t step = 0; step < n; step++)
        cells[step] = (uint16_t)(without == 7 || (without > 4 && check_below(check, 4) == 0)
                                     ? KVANT_TRELLIS_NO_NUMBER
                                     : check_below(check, KVANT_TRELLIS_CELLS));
    return cells;
}

CHECK(trellis_path)
{
    static const uint32_t steps[] = { 64, 1, 7, 16, 31, 33, 48, 128, 400, KVANT_TRELLIS_MAX_STEPS };
    uint8_t want[KVANT_TRELLIS_MAX_STEPS];
    for (uint32_t round = 0; round < 8; round++)
        for (size_t s = 0; s < COUNT(steps); s++)
            for (int kind = 0; kind < N_COST_KINDS; kind++) {
                check_case(check, "%u steps, kind %d, round %u", steps[s], kind, round);
                const kvant_trellis *trellis = make_trellis(check, (cost_kind)kind);
                const uint16_t *cells = make_cells(check, steps[s]);
                uint8_t *bits = check_output(check, "bits", steps[s], 1);
                if (check_compares(check))
                    c->trellis_path(trellis, cells, steps[s], want);
                CHECK_CALL(check, kernels->trellis_path(trellis, cells, steps[s], bits));
                check_same(check, "bits", bits, want, steps[s], 1);
            }
}

BENCH(trellis_path)
{
    check_case(check, "bench");
    const kvant_trellis *trellis = make_trellis(check, ANY_COSTS);
    uint16_t *cells = check_input(check, "cells", 128 * sizeof *cells, 64);
    uint8_t *bits = check_output(check, "bits", 128, 64);
    for (uint32_t step = 0; step < 128; step++)
        cells[step] = (uint16_t)check_below(check, KVANT_TRELLIS_CELLS);
    CHECK_BENCH(check, kernels->trellis_path(trellis, cells, 128, bits), "128 steps");
}

typedef struct dots_shape {
    kvant_role role;
    uint32_t dim, bits, n;
} dots_shape;

typedef struct level_dots {
    kvant_layout layout;
    const kvant_trellis *trellis;
    uint8_t *page;
    int16_t *x;
    size_t width, stride;
    int32_t *got;
} level_dots;

/* A page of any bytes, and integers as large as their sums allow. */
static level_dots make_level_dots(checker *check, const dots_shape *s)
{
    level_dots p;
    check_case(check, "role %d, head_dim %u, %u bits, %u vectors", (int)s->role, s->dim, s->bits,
               s->n);
    kvant_trellis_book *book = check_input(check, "trellis", sizeof *book, 64);
    memset(book, 0, sizeof *book);
    kvant_layout_init(&p.layout, s->role, s->dim, s->bits);
    kvant_trellis_book_init(book, &p.layout);
    p.trellis = &book->trellis;
    p.width = (p.layout.column_tiles + 3) / 4 * 64;
    p.stride = (p.layout.row_tiles + 3) / 4 * 64;
    p.page = check_input(check, "page", p.layout.code_bytes, 64);
    p.x = check_input(check, "x", s->n * p.width * sizeof *p.x, 64);
    p.got = check_output(check, "dots", s->n * p.stride * sizeof *p.got, 64);
    check_bytes(check, p.page, p.layout.code_bytes, -1);
    int32_t limit = INT32_MAX / (INT8_MAX * (int32_t)(16 * p.layout.column_tiles));
    limit = limit < KVANT_CODE_OPERAND_MAX ? limit : KVANT_CODE_OPERAND_MAX;
    for (uint32_t i = 0; i < s->n; i++)
        for (uint32_t c = 0; c < p.width; c++) /* the last block is filled up with zeros */
            p.x[i * p.width + c / 64 * 64 + kvant_token_position(c % 64)] =
                (int16_t)(c < 16 * p.layout.column_tiles
                              ? (int32_t)check_below(check, 2 * (uint32_t)limit + 1) - limit
                              : 0);
    return p;
}

static void check_level_dots(checker *check, const kvant_kernels *kernels, const kvant_kernels *c,
                             const dots_shape *s)
{
    static int32_t want[8 * KVANT_MAX_HEAD_DIM];
    const level_dots p = make_level_dots(check, s);
    if (check_compares(check))
        c->trellis_dots(p.trellis, &p.layout, p.page, p.x, p.width, want, p.stride, s->n);
    CHECK_CALL(check, kernels->trellis_dots(p.trellis, &p.layout, p.page, p.x, p.width, p.got,
                                            p.stride, s->n));
    for (uint32_t i = 0; i < s->n; i++)
        for (uint32_t row = 0; row < 16 * p.layout.row_tiles; row++) {
            const size_t at = i * p.stride + row / 64 * 64 + kvant_token_position(row % 64);
            check_same(check, "dot", p.got + at, want + at, 1, sizeof *want);
        }
}

CHECK(trellis_dots)
{
    static const uint32_t dims[] = { 16, 32, 40, 48, 64, 80, 96, 112, 128, 192, 208, 256, 512 };
    for (size_t d = 0; d < COUNT(dims); d++)
        for (int role = 0; role < 2; role++)
            for (uint32_t bits = 2; bits <= 4; bits++)
                for (uint32_t n = 1; n <= 7; n++) {
                    const dots_shape s = { (kvant_role)role, dims[d], bits, n };
                    check_level_dots(check, kernels, c, &s);
                }
}

BENCH(trellis_dots)
{
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (uint32_t n = 1; n <= 4; n *= 4)
            for (int role = 0; role < 2; role++) {
                const dots_shape s = { (kvant_role)role, 128, bits, n };
                const level_dots p = make_level_dots(check, &s);
                CHECK_BENCH(check,
                            kernels->trellis_dots(p.trellis, &p.layout, p.page, p.x, p.width, p.got,
                                                  p.stride, n),
                            "%s, head_dim 128, %u bits, n %u", role == KVANT_ROLE_K ? "K" : "V",
                            bits, n);
            }
}

typedef struct value_tile {
    kvant_layout layout;
    const kvant_trellis *trellis;
    uint8_t *page;
    float *scale, *got;
    size_t n; /* numbers of the tile */
} value_tile;

/* A page of any bytes. */
static value_tile make_value_tile(checker *check, uint32_t dim, uint32_t bits)
{
    value_tile p;
    check_case(check, "head_dim %u, %u bits", dim, bits);
    kvant_trellis_book *book = check_input(check, "trellis", sizeof *book, 64);
    memset(book, 0, sizeof *book);
    kvant_layout_init(&p.layout, KVANT_ROLE_V, dim, bits);
    kvant_trellis_book_init(book, &p.layout);
    p.trellis = &book->trellis;
    p.page = check_input(check, "page", p.layout.code_bytes, 64);
    p.scale = check_input(check, "scale", KVANT_PAGE_TOKENS * sizeof *p.scale, 64);
    p.n = (size_t)KVANT_PAGE_TOKENS * p.layout.padded_dim;
    p.got = check_output(check, "tile", p.n * sizeof *p.got, 64);
    check_bytes(check, p.page, p.layout.code_bytes, -1);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        p.scale[t] = (float)check_below(check, 1000) * 0.0137f;
    return p;
}

CHECK(trellis_values)
{
    static const uint32_t dims[] = { 16, 40, 64, 80, 128, 192, 256, 512 };
    static float want[KVANT_PAGE_TOKENS * KVANT_MAX_HEAD_DIM];
    for (size_t d = 0; d < COUNT(dims); d++)
        for (uint32_t bits = 2; bits <= 4; bits++) {
            const value_tile p = make_value_tile(check, dims[d], bits);
            if (check_compares(check))
                c->trellis_values(p.trellis, &p.layout, p.page, 0.07f, p.scale, want);
            CHECK_CALL(check, kernels->trellis_values(p.trellis, &p.layout, p.page, 0.07f, p.scale,
                                                      p.got));
            check_same(check, "tile", p.got, want, p.n, sizeof *want);
        }
}

BENCH(trellis_values)
{
    for (uint32_t bits = 2; bits <= 4; bits++) {
        const value_tile p = make_value_tile(check, 64, bits);
        CHECK_BENCH(check,
                    kernels->trellis_values(p.trellis, &p.layout, p.page, 0.07f, p.scale, p.got),
                    "head_dim 64, %u bits", bits);
    }
}

typedef struct trellis_pack {
    kvant_pack_format *format;
    const kvant_trellis *trellis;
    uint8_t *codes, *levels;
} trellis_pack;

/* Any codes. */
static trellis_pack make_trellis_pack(checker *check, uint32_t bits, uint32_t dim)
{
    trellis_pack p;
    kvant_layout layout;
    check_case(check, "%u bits, %u dimensions", bits, dim);
    kvant_trellis_book *book = check_input(check, "trellis", sizeof *book, 64);
    memset(book, 0, sizeof *book);
    kvant_layout_init(&layout, KVANT_ROLE_K, 64, bits);
    kvant_trellis_book_init(book, &layout);
    p.trellis = &book->trellis;
    p.format = check_input(check, "format", sizeof *p.format, 4);
    *p.format = (kvant_pack_format){ .bits = bits, .n_quads = kvant_pack_quads(dim, bits) };
    p.codes = check_input(check, "codes", kvant_pack_bytes(p.format), 64);
    p.levels = check_output(check, "levels", (size_t)p.format->n_quads * 128, 64);
    check_bytes(check, p.codes, kvant_pack_bytes(p.format), -1);
    return p;
}

/* A level by the page on index files, written a second time: chunk i of low bits, field by
 * field. */
static uint32_t wanted_level(const trellis_pack *p, uint32_t dim, uint32_t v)
{
    const uint32_t bits = p->format->bits, quads = p->format->n_quads;
    const uint32_t circles = (quads + 127) / 128, unit = bits == 3 ? 4 : bits == 2 ? 2 : 1;
    uint32_t first = 0, end = 0, subset = 0;
    for (uint32_t i = 0; dim / 4 >= end; i++) {
        first = end;
        end = quads / unit * (i + 1) / circles * unit;
    }
    const uint32_t n = 4 * (end - first), per = bits == 4 ? 1 : 2, chunks = (end - first) / per;
    const uint32_t quad = dim / 4 - first,
                   step = (dim % 4 * per + quad % per) * chunks + quad / per;
    static const uint32_t taps[3] = { 010, 0101, 042 };
    for (uint32_t parity = 0; parity < 3; parity++)
        for (uint32_t back = 0; back <= 6; back++) {
            const uint32_t at = (step + n - back) % n, field = at / chunks, chunk = at % chunks;
            const uint32_t other = 4 * (first + chunk * per + field % per) + field / per;
            if (taps[parity] >> back & 1)
                subset ^= (kvant_pack_get(bits, p->codes, other, v) & 1) << parity;
        }
    return (
        uint32_t)(128 +
                  p->trellis->levels[8 * (kvant_pack_get(bits, p->codes, dim, v) / 2) + subset]);
}

CHECK(trellis_pack)
{
    static const uint32_t dims[] = { 16, 17, 32, 60, 100, 384, 513, 1000, 1536 };
    static uint8_t want[1536 * 32];
    for (uint32_t bits = 2; bits <= 4; bits++)
        for (size_t d = 0; d < COUNT(dims); d++) {
            const trellis_pack p = make_trellis_pack(check, bits, dims[d]);
            const uint32_t n = p.format->n_quads * 4;
            for (uint32_t i = 0; check_compares(check) && i < n * 32; i++)
                want[i / 128 * 128 + i % 32 / 16 * 64 + i % 16 * 4 + i / 32 % 4] =
                    (uint8_t)wanted_level(&p, i / 32, i % 32);
            CHECK_CALL(check, kernels->trellis_pack(p.trellis, p.format, p.codes, p.levels));
            check_same(check, "levels", p.levels, want, (size_t)n * 32, 1);
        }
}

BENCH(trellis_pack)
{
    for (uint32_t bits = 2; bits <= 4; bits++) {
        const trellis_pack p = make_trellis_pack(check, bits, 384);
        CHECK_BENCH(check, kernels->trellis_pack(p.trellis, p.format, p.codes, p.levels), "%u bits",
                    bits);
    }
}
