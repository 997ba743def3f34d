/* check_chunks.c - kernels on pages of chunk codes, against codes that are read one by one:
 * triplets in double within the bound of kernels.h, chunks of four exactly. */
#include "check.h"

#include "../../src/kernels/chunk_tiles.h"

static const uint32_t dims[] = { 6, 16, 32, 40, 64, 80, 96, 97, 98, 99, 112, 128, 256, 512 };

static void fill_page(checker *check, void *page, size_t bytes, uint32_t round)
{
    check_bytes(check, page, bytes, round == 0 ? 0 : round == 1 ? 0xff : -1);
}

static void fill_scales(checker *check, float *scale)
{
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        uint32_t kind = check_below(check, 8);
        scale[t] = kind == 0   ? 0
                   : kind == 1 ? kvant_half_to_float((uint16_t)(1 + check_below(check, 1023)))
                   : kind == 2 ? KVANT_HALF_MAX
                               : check_uniform(check);
    }
}

static size_t tile_place(kvant_role role, uint32_t dim, uint32_t token, uint32_t channel)
{
    size_t position = kvant_token_position(token);
    return role == KVANT_ROLE_K ? (size_t)channel * KVANT_PAGE_TOKENS + position
                                : position * kvant_padded_dim(dim) + channel;
}

/* Padding channels of K are zeros; padding channels of V may be anything. */
static void check_padding(checker *check, kvant_role role, uint32_t dim, const float *tile)
{
    for (uint32_t j = dim; role == KVANT_ROLE_K && j < kvant_padded_dim(dim); j++)
        for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
            check_near(check, "padding", tile_place(role, dim, t, j),
                       tile[tile_place(role, dim, t, j)], 0, 0);
}

/* Levels that a book may have: increasing, and odd about 0 for directions. */
static void fill_book(checker *check, uint32_t direction_bits, uint32_t norm_bits,
                      kvant_triplet_book *book)
{
    const uint32_t n = 1u << direction_bits;
    memset(book, 0, sizeof *book);
    book->direction_bits = direction_bits;
    book->norm_bits = norm_bits;
    for (uint32_t k = 0; k < n / 2; k++) {
        float level = ((float)k + 0.1f + 0.8f * check_uniform(check)) * 2 / (float)n;
        book->direction[n / 2 + k] = level;
        book->direction[n / 2 - 1 - k] = -level;
    }
    for (uint32_t k = 0; k < 1u << norm_bits; k++)
        book->norm[k] = ((float)k + check_uniform(check)) * 3 / (float)(1u << norm_bits);
}

static void check_triplet(checker *check, const kvant_triplet_book *book, uint32_t code,
                          float scale, uint32_t j, size_t at, float got)
{
    const uint32_t mask = (1u << book->direction_bits) - 1;
    const float u = book->direction[code & mask],
                w = book->direction[code >> book->direction_bits & mask];
    /* Computed as the decoder does: the rounding of a small component is large relative to it. */
    const float z = 1 - fabsf(u) - fabsf(w), fold = z < 0 ? -z : 0;
    const float x[3] = { u - copysignf(fold, u), w - copysignf(fold, w), z };
    const double length = sqrt((double)x[0] * x[0] + (double)x[1] * x[1] + (double)x[2] * x[2]);
    const double want =
        (double)scale * book->norm[code >> (2 * book->direction_bits)] / length * x[j];
    /* The decoder errs by at most 6 roundings. */
    check_near(check, "tile", at, got, want, fabs(want) * 0x1p-20 + 6 * check_rounding(want));
}

static void check_triplets_of(checker *check, const kvant_kernels *kernels, kvant_role role,
                              uint32_t dim, uint32_t direction_bits, uint32_t norm_bits,
                              uint32_t round)
{
    kvant_chunk_layout layout;
    uint32_t codes[KVANT_MAX_HEAD_DIM];
    const kvant_triplet_positions places = kvant_triplet_positions_of(dim);
    kvant_chunk_layout_init(&layout, role, (dim + 2) / 3, 2 * direction_bits + norm_bits);
    check_case(check, "role %d, head_dim %u, %u + %u bits, round %u", (int)role, dim,
               direction_bits, norm_bits, round);
    kvant_triplet_book *book = check_input(check, "book", sizeof *book, 4);
    float *scale = check_input(check, "scale", KVANT_PAGE_TOKENS * sizeof *scale, 64);
    void *page = check_input(check, "page", layout.code_bytes + 64, 64);
    float *tile = check_output(
        check, "tile", (size_t)kvant_padded_dim(dim) * KVANT_PAGE_TOKENS * sizeof *tile, 64);
    fill_book(check, direction_bits, norm_bits, book);
    fill_scales(check, scale);
    fill_page(check, page, layout.code_bytes + 64, round);
    CHECK_CALL(check, kernels->unpack_triplets(book, &layout, page, scale, dim, tile));
    check_padding(check, role, dim, tile);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS && check_compares(check); t++) {
        kvant_chunk_layout_get(&layout, page, t, codes);
        for (uint32_t j = 0; j < dim; j++) {
            uint32_t channel = role == KVANT_ROLE_K ? j : places.first[j % 3] + j / 3;
            size_t at = tile_place(role, dim, t, channel);
            check_triplet(check, book, codes[j / 3], scale[kvant_token_position(t)], j % 3, at,
                          tile[at]);
        }
    }
}

CHECK(unpack_triplets)
{
    static const uint8_t bits[][2] = { { 1, 0 }, { 2, 1 }, { 3, 1 }, { 4, 2 }, { 4, 3 }, { 5, 3 },
                                       { 5, 0 }, { 6, 4 }, { 3, 5 }, { 8, 7 }, { 7, 2 } };
    for (size_t b = 0; b < COUNT(bits); b++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (int role = 0; role < 2; role++)
                for (uint32_t round = 0; round < 3; round++)
                    check_triplets_of(check, kernels, (kvant_role)role, dims[d], bits[b][0],
                                      bits[b][1], round);
}

BENCH(unpack_triplets)
{
    static const uint32_t bench_dims[] = { 64, 128 };
    for (size_t d = 0; d < COUNT(bench_dims); d++)
        for (uint32_t bits = 2; bits <= 4; bits++)
            for (int role = 0; role < 2; role++) {
                const uint32_t dim = bench_dims[d];
                kvant_chunk_layout layout;
                kvant_chunk_layout_init(&layout, (kvant_role)role, (dim + 2) / 3, 3 * bits + 1);
                check_case(check, "bench");
                kvant_triplet_book *book = check_input(check, "book", sizeof *book, 64);
                float *scale = check_input(check, "scale", KVANT_PAGE_TOKENS * sizeof *scale, 64);
                void *page = check_input(check, "page", layout.code_bytes + 64, 64);
                float *tile =
                    check_output(check, "tile", (size_t)dim * KVANT_PAGE_TOKENS * sizeof *tile, 64);
                fill_book(check, bits + 1, bits - 1, book);
                fill_scales(check, scale);
                fill_page(check, page, layout.code_bytes + 64, 2);
                CHECK_BENCH(check, kernels->unpack_triplets(book, &layout, page, scale, dim, tile),
                            "%s, head_dim %u, %u bits", role == KVANT_ROLE_K ? "K" : "V", dim,
                            bits);
            }
}

typedef struct direction_case {
    kvant_direction_book book;
    kvant_chunk_layout layout;
    float *scale, *tile;
    void *page;
    uint16_t *outliers;
} direction_case;

static direction_case make_directions(checker *check, kvant_role role, uint32_t dim,
                                      uint32_t n_codewords, uint32_t radius_bits, uint32_t slots,
                                      uint32_t round)
{
    direction_case p = { .book = { NULL, n_codewords, 0, slots } };
    while (1u << p.book.index_bits < n_codewords + (slots > 0))
        p.book.index_bits++;
    kvant_chunk_layout_init(&p.layout, role, (dim + 3) / 4, p.book.index_bits + radius_bits);
    check_case(check, "role %d, head_dim %u, %u directions, %u bits, %u slots, round %u", (int)role,
               dim, n_codewords, radius_bits, slots, round);
    const size_t n = (size_t)4 << p.book.index_bits, halves = (size_t)4 * slots * KVANT_PAGE_TOKENS;
    float *codewords = check_input(check, "codewords", n * sizeof *codewords, 16);
    p.scale = check_input(check, "scale", KVANT_PAGE_TOKENS * sizeof *p.scale, 64);
    p.page = check_input(check, "page", p.layout.code_bytes + 64, 64);
    p.tile = check_output(check, "tile",
                          (size_t)kvant_padded_dim(dim) * KVANT_PAGE_TOKENS * sizeof *p.tile, 64);
    p.outliers = check_input(check, "outliers", halves * sizeof *p.outliers, 2);
    memset(codewords, 0, n * sizeof *codewords);
    check_floats(check, codewords, (size_t)4 * n_codewords, CHECK_NORMAL);
    for (size_t i = 0; i < halves; i++)
        p.outliers[i] = kvant_half_from_float(check_normal(check));
    fill_scales(check, p.scale);
    fill_page(check, p.page, p.layout.code_bytes + 64, round);
    p.book.codewords = codewords;
    return p;
}

static float direction_number(const direction_case *p, uint32_t code, uint32_t token, uint32_t i)
{
    const uint32_t index = code & ((1u << p->book.index_bits) - 1),
                   above = code >> p->book.index_bits;
    if (index == p->book.n_codewords && above < p->book.slots)
        return kvant_half_to_float(
            p->outliers[((size_t)above * KVANT_PAGE_TOKENS + token) * 4 + i]);
    return p->scale[kvant_token_position(token)] * (float)above *
           p->book.codewords[(size_t)4 * index + i];
}

/* Makes some codes of every page the codes of outliers; random codes would hardly ever be. */
static void plant_outliers(checker *check, const direction_case *p)
{
    uint32_t codes[KVANT_MAX_HEAD_DIM];
    for (uint32_t t = 0; p->book.slots && t < KVANT_PAGE_TOKENS; t++) {
        kvant_chunk_layout_get(&p->layout, p->page, t, codes);
        for (uint32_t i = 0; i < 2; i++)
            codes[check_below(check, p->layout.n_chunks)] =
                p->book.n_codewords |
                check_below(check, 1u << (p->layout.bits - p->book.index_bits))
                    << p->book.index_bits;
        kvant_chunk_layout_put(&p->layout, p->page, t, codes);
    }
}

static void check_directions_of(checker *check, const kvant_kernels *kernels, kvant_role role,
                                uint32_t dim, uint32_t n_codewords, uint32_t radius_bits,
                                uint32_t slots, uint32_t round)
{
    direction_case p = make_directions(check, role, dim, n_codewords, radius_bits, slots, round);
    uint32_t codes[KVANT_MAX_HEAD_DIM];
    plant_outliers(check, &p);
    CHECK_CALL(check, kernels->unpack_directions(&p.book, &p.layout, p.page, p.scale, p.outliers,
                                                 dim, p.tile));
    check_padding(check, role, dim, p.tile);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS && check_compares(check); t++) {
        kvant_chunk_layout_get(&p.layout, p.page, t, codes);
        for (uint32_t j = 0; j < dim; j++) {
            const size_t at = tile_place(role, dim, t, j);
            check_near(check, "tile", at, p.tile[at], direction_number(&p, codes[j / 4], t, j % 4),
                       0);
        }
    }
}

CHECK(unpack_directions)
{
    static const uint32_t books[][3] = { { 24, 2, 0 },   { 576, 3, 0 },  { 384, 4, 1 },
                                         { 2304, 4, 0 }, { 2304, 4, 3 }, { 3000, 6, 2 },
                                         { 36864, 4, 0 } };
    for (size_t b = 0; b < COUNT(books); b++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (int role = 0; role < 2; role++)
                for (uint32_t round = 0; round < 3; round++)
                    check_directions_of(check, kernels, (kvant_role)role, dims[d], books[b][0],
                                        books[b][1], books[b][2], round);
}

BENCH(unpack_directions)
{
    static const uint32_t bench_dims[] = { 64, 128 };
    for (size_t d = 0; d < COUNT(bench_dims); d++)
        for (int role = 0; role < 2; role++) {
            const uint32_t dim = bench_dims[d];
            direction_case p = make_directions(check, (kvant_role)role, dim, 2304, 4, 0, 2);
            CHECK_BENCH(check,
                        kernels->unpack_directions(&p.book, &p.layout, p.page, p.scale, p.outliers,
                                                   dim, p.tile),
                        "%s, head_dim %u, 2304 directions", role == KVANT_ROLE_K ? "K" : "V", dim);
        }
}

typedef struct dots_case {
    kvant_chunk_values *numbers;
    kvant_chunk_layout layout;
    void *page;
    int16_t *x;
    int32_t *dots;
    size_t x_stride, dots_stride;
    uint32_t n;
} dots_case;

/* Levels, pieces and lengths with the distribution of a codec's. */
static void make_octahedral(checker *check, kvant_chunk_values *numbers, int16_t *entries)
{
    kvant_octahedral_integers *o = check_input(check, "octahedral", sizeof *o, 4);
    const uint32_t n = 1u << numbers->index_bits / 2;
    o->bits = numbers->index_bits / 2;
    for (uint32_t i = 0; i < 32; i++) {
        o->levels[i] = i < n
                           ? (int16_t)((int32_t)check_below(check, 2 * KVANT_OCTAHEDRAL_UNIT - 1) -
                                       KVANT_OCTAHEDRAL_UNIT + 1)
                           : o->levels[i % n];
        const double x = 1024 * (i < 10 ? 10 : i) + 512, inverse = 8100 * sqrt(32768 / x);
        o->base[i] = (int16_t)(1.5 * inverse);
        o->slope[i] = (int16_t)(-0.5 * inverse / x * 32768);
    }
    for (uint32_t index = 0; index < n * n; index++)
        kvant_octahedral_entry(o, index % n, index / n, entries + (size_t)4 * index);
    for (uint32_t i = 0; i < COUNT(numbers->lengths); i++)
        numbers->lengths[i] = (int16_t)check_below(check, 16381);
    numbers->octahedral = o;
}

/* round 1: the largest numbers and x that are allowed, all of one sign. */
static dots_case make_dots(checker *check, kvant_role role, uint32_t dim, uint32_t components,
                           uint32_t index_bits, uint32_t length_bits, uint32_t n, uint32_t round)
{
    dots_case p = { .n = n };
    const uint32_t chunks = (dim + components - 1) / components,
                   length_max = (1u << length_bits) - 1;
    const bool linear = components == 4, key = role == KVANT_ROLE_K;
    kvant_chunk_layout_init(&p.layout, role, chunks, index_bits + length_bits);
    check_case(check, "role %d, head_dim %u, chunks of %u, %u + %u bits, n %u, round %u", (int)role,
               dim, components, index_bits, length_bits, n, round);
    const uint32_t columns = key ? kvant_key_position(components, chunks + chunks % 2, 0)
                                 : KVANT_PAGE_TOKENS,
                   n_entries = 1u << index_bits;
    p.x_stride = (columns + 63) / 64 * 64;
    p.dots_stride = key || kvant_padded_dim(dim) < 64 ? 64 : kvant_padded_dim(dim);
    p.numbers = check_input(check, "numbers", sizeof *p.numbers, 8);
    int16_t *entries = check_input(check, "entries", (size_t)8 * n_entries, 8);
    p.page = check_input(check, "page", p.layout.code_bytes + 64, 64);
    p.x = check_input(check, "x", n * p.x_stride * sizeof *p.x, 64);
    p.dots = check_output(check, "dots", n * p.dots_stride * sizeof *p.dots, 64);
    *p.numbers = (kvant_chunk_values){ .entries = entries,
                                       .components = components,
                                       .dim = dim,
                                       .index_bits = index_bits,
                                       .step = linear ? 4095 / (int32_t)length_max : 0 };
    for (uint32_t i = 0; i < COUNT(p.numbers->lengths); i++)
        p.numbers->lengths[i] = (int16_t)(round == 1 ? 4095 : check_below(check, 4096));
    for (uint32_t i = 0; i < 4 * n_entries; i++)
        entries[i] = (int16_t)(i % 4 >= components ? 0
                               : round == 1        ? 32767
                                                   : (int32_t)check_below(check, 65535) - 32767);
    fill_page(check, p.page, p.layout.code_bytes + 64, round);
    if (components == 3 && index_bits / 2 <= KVANT_OCTAHEDRAL_MAX_BITS && round != 1)
        make_octahedral(check, p.numbers, entries);
    int32_t limit = INT32_MAX / (4095 * (int32_t)(key ? kvant_padded_dim(dim) : KVANT_PAGE_TOKENS));
    for (uint32_t i = 0; i < n; i++) {
        memset(p.x + i * p.x_stride, 0, columns * sizeof *p.x);
        for (uint32_t j = 0; j < (key ? dim : columns); j++)
            p.x[i * p.x_stride +
                (key ? kvant_key_position(components, j / components, j % components) : j)] =
                (int16_t)(round == 1
                              ? (i % 2 ? -limit : limit)
                              : (int32_t)check_below(check, 2 * (uint32_t)limit + 1) - limit);
    }
    return p;
}

static int64_t number_of(const kvant_chunk_values *numbers, uint32_t code, uint32_t j)
{
    const uint32_t index = code & ((1u << numbers->index_bits) - 1),
                   above = code >> numbers->index_bits;
    const int64_t length = numbers->step ? numbers->step * (int64_t)above : numbers->lengths[above];
    return (int64_t)floor((double)numbers->entries[4 * index + j] * (double)length / 32768 + 0.5);
}

static void expect_dots(const dots_case *p, int64_t *want)
{
    const kvant_chunk_values *numbers = p->numbers;
    const kvant_triplet_positions places = kvant_triplet_positions_of(numbers->dim);
    const bool key = p->layout.role == KVANT_ROLE_K;
    uint32_t codes[KVANT_MAX_HEAD_DIM];
    memset(want, 0, p->n * p->dots_stride * sizeof *want);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        kvant_chunk_layout_get(&p->layout, p->page, t, codes);
        for (uint32_t j = 0; j < numbers->dim; j++) {
            const uint32_t c = j / numbers->components, k = j % numbers->components;
            const int64_t number = number_of(numbers, codes[c], k);
            const size_t row = key                        ? kvant_token_position(t)
                               : numbers->components == 3 ? places.first[k] + c
                                                          : j;
            const size_t column =
                key ? kvant_key_position(numbers->components, c, k) : kvant_token_position(t);
            for (uint32_t i = 0; i < p->n; i++)
                want[i * p->dots_stride + row] += number * p->x[i * p->x_stride + column];
        }
    }
}

static void check_dots(checker *check, const kvant_kernels *kernels, const dots_case *p)
{
    static int64_t want[16 * KVANT_MAX_HEAD_DIM];
    const uint32_t rows =
        p->layout.role == KVANT_ROLE_K ? KVANT_PAGE_TOKENS : kvant_padded_dim(p->numbers->dim);
    if (check_compares(check))
        expect_dots(p, want);
    CHECK_CALL(check, kernels->chunk_dots(p->numbers, &p->layout, p->page, p->x, p->x_stride,
                                          p->dots, p->dots_stride, p->n));
    for (uint32_t i = 0; i < p->n; i++)
        for (uint32_t j = 0; j < rows; j++)
            check_near(check, "dots", i * p->dots_stride + j, p->dots[i * p->dots_stride + j],
                       (double)want[i * p->dots_stride + j], 0);
}

CHECK(chunk_dots)
{
    static const uint8_t kinds[][3] = { { 3, 10, 3 }, { 3, 8, 2 },  { 3, 6, 1 }, { 3, 2, 0 },
                                        { 3, 12, 4 }, { 4, 12, 4 }, { 4, 9, 4 }, { 4, 5, 2 },
                                        { 4, 10, 3 }, { 4, 8, 8 } };
    for (size_t k = 0; k < COUNT(kinds); k++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (int role = 0; role < 2; role++)
                for (uint32_t round = 0; round < 3; round++) {
                    dots_case p =
                        make_dots(check, (kvant_role)role, dims[d], kinds[k][0], kinds[k][1],
                                  kinds[k][2], 1 + check_below(check, 14), round);
                    check_dots(check, kernels, &p);
                }
}

BENCH(chunk_dots)
{
    static const uint8_t kinds[][4] = {
        { 3, 10, 3, 3 }, { 3, 8, 2, 3 }, { 4, 12, 4, 3 }, { 4, 12, 4, 96 }
    };
    for (size_t k = 0; k < COUNT(kinds); k++)
        for (int role = 0; role < 2; role++) {
            dots_case p = make_dots(check, (kvant_role)role, 64, kinds[k][0], kinds[k][1],
                                    kinds[k][2], kinds[k][3], 2);
            CHECK_BENCH(check,
                        kernels->chunk_dots(p.numbers, &p.layout, p.page, p.x, p.x_stride, p.dots,
                                            p.dots_stride, p.n),
                        "%s, chunks of %u, %u + %u bits, n %u", role == KVANT_ROLE_K ? "K" : "V",
                        kinds[k][0], kinds[k][1], kinds[k][2], kinds[k][3]);
        }
}
