/* trellis_dots_template.h - attention on trellis codes: the codes of a page become a tile of bytes,
 * the levels, and the tile is multiplied by all vectors x.
 *
 * A word holds 4-bit codes, or the low 2 bits of shorter codes (2 or 3 bits). The trellis bit of
 * each code is among them. A subset depends on the trellis bits of the preceding steps. These bits
 * lie in the same fields of the preceding words. Before the first word they lie in the neighbouring
 * field of the last words, or in another lane. So words are laid out in order, the preceding words
 * first, and subsets are exclusive ors of whole words. The order of pages and steps is in
 * format.md, "Scalar codes" and "Trellis codes". The including file defines NAME, LANES and
 *
 *   vi vi_set vi_load vi_and vi_add vi_load_repeated, add_pairs(sum, a, b) of 16-bit pairs
 *   vw_shift_left(v, n), vw_shift_right(v, n)   n is a constant, but not always a literal
 *   vi_store_aligned(p, v)
 *   vi_xor(a, b)
 *   vi_select(mask, a, b)        bits of a where the mask has ones, else of b
 *   vi_rotate_left(v, n)         of 32 bits
 *   vi_rotate_four(v)            lane i of every four becomes lane i + 1, the last lane the first
 *   next_lanes(v)                the same for the 4 128-bit lanes of 16 / LANES vectors, in place
 *   vi_pick_bytes(v, index)      pshufb
 *   vi_odd_bytes(v)              the upper 8 bits of every 16 bits
 *   level_tables, load_levels(kvant_trellis.in_words), look_up_levels(tables, index, bits)
 *                                bytes for bytes of index, whose bits from bits + 2 on may be
 *                                anything
 *   store_lane_sums(out, sums)   the 128-bit lanes of each of 4 vectors added: 16 numbers
 *   LEVEL_ROWS                   vectors x that are multiplied at a time, 3 or 4
 *   each_operand                 for, unrolled where that does not spill
 *   vi_bytes_before(v)           may be defined: key_fields_before of 4-bit codes */
#define ROW_VECTORS (16 / LANES) /* vectors that hold the 16 words of one row r of four tiles */
#define MAX_UNITS (KVANT_MAX_HEAD_DIM / KVANT_TILE)
#define LEVEL_BIAS 128

/* 16 words. They are 4 lanes of columns; each lane has a word for every row tile of a group. */
typedef struct row_words {
    vi at[ROW_VECTORS];
} row_words;

typedef struct level_tile {
    _Alignas(64) uint8_t at[KVANT_MAX_HEAD_DIM * KVANT_PAGE_TOKENS];
} level_tile;

typedef struct level_job {
    const kvant_trellis *trellis;
    const kvant_layout *layout;
    const uint32_t *planes[KVANT_MAX_HEAD_DIM / KVANT_PAGE_TOKENS]
                          [KVANT_MAX_PLANES]; /* the planes of row groups of 4 tiles */
    level_tile *tile; /* [row group][r][unit][field of a byte], 64 bytes each */
} level_job;

/* The mask of the trellis bits in a plane's fields. */
KVANT_INLINE uint32_t trellis_bits(uint32_t bits)
{
    return bits == 4 ? 0x11111111 : 0x55555555;
}

KVANT_INLINE uint32_t first_plane(uint32_t bits)
{
    return bits == 4 ? 4 : 2;
}

KVANT_INLINE row_words load_row(const uint32_t *words)
{
    row_words row;
#pragma GCC unroll 2
    for (uint32_t v = 0; v < ROW_VECTORS; v++)
        row.at[v] = vi_load(words + LANES * v);
    return row;
}

/* The codes one step earlier in a row of keys: fields move up by one step's width, and the last
 * field moves to the first field of the next lane. */
KVANT_INLINE row_words key_fields_before(row_words row, uint32_t bits)
{
    const uint32_t width = 2 * first_plane(bits);
    row_words rotated, out;
#ifdef vi_bytes_before
    if (bits == 4) {
        row.at[0] = vi_bytes_before(row.at[0]);
        return row;
    }
#endif
#pragma GCC unroll 2
    for (uint32_t v = 0; v < ROW_VECTORS; v++)
        rotated.at[v] = out.at[v] = vi_rotate_left(row.at[v], width);
    next_lanes(rotated.at);
#pragma GCC unroll 2
    for (uint32_t v = 0; v < ROW_VECTORS; v++)
        out.at[v] = vi_select(vi_set((1 << width) - 1), rotated.at[v], out.at[v]);
    return out;
}

/* The codes one step earlier in a unit of values. Row r moves to row r + 8, and row r + 8 moves to
 * row r of the next row tile. */
KVANT_INLINE row_words value_fields_before(row_words row, uint32_t bits)
{
    const uint32_t p = first_plane(bits);
    const vi low = vi_set(p == 4 ? 0x0f0f0f0f : 0x33333333);
#pragma GCC unroll 2
    for (uint32_t v = 0; v < ROW_VECTORS; v++)
        row.at[v] = vi_select(low, vw_shift_right(vi_rotate_four(row.at[v]), p),
                              vw_shift_left(row.at[v], p));
    return row;
}

/* Stores the levels of a word's codes. step points to the word; the words of the preceding steps
 * lie before it. There are 2 vectors of bytes for codes of 4 bits, 4 for narrower
 * codes. `more` has the third bits of 3-bit codes, in bits 0 .. 3 of bytes. The order of levels is
 * kvant_trellis.in_words. */
KVANT_INLINE void store_levels(const level_tables *tables, uint32_t bits, const row_words *step,
                               uint32_t v, vi more, uint8_t *out)
{
    const uint32_t p = first_plane(bits);
    const vi w = step->at[v], z0 = step[-3].at[v], z1 = vi_xor(w, step[-6].at[v]),
             z2 = vi_xor(step[-1].at[v], step[-5].at[v]); /* by the taps */
    const vi newest = vi_set((int)trellis_bits(bits)),
             low = vi_set(p == 4 ? 0x0f0f0f0f : 0x03030303);
    const vi x = vi_select(newest, z0, w), y = vi_select(newest, z1, vi_add(z2, z2));
    unrolled_for (uint32_t i = 0; i < 8 / p; i++) {
        const vi above = i == 0 ? vw_shift_left(y, p) : i == 1 ? y : vw_shift_right(y, p * (i - 1));
        vi index = vi_select(low, i ? vw_shift_right(x, p * i) : x, above);
        if (bits == 3)
            index = vi_select(vi_set(0x0f0f0f0f), index, vw_shift_left(more, 4 - i));
        vi_store_aligned(out + 64 * i, look_up_levels(tables, index, bits));
    }
}

/* The third bits of the codes of a word. The bits of tile 2 (unit mod 2) and of the tile after it
 * go to one byte each. */
KVANT_INLINE vi third_bits(const uint32_t *words, uint32_t unit)
{
    const vi w = vi_load(words);
    const vi pair = unit % 2 ? vw_shift_right(w, 8) : w;
    return vi_select(vi_set(0x000f000f), pair, vw_shift_left(pair, 4));
}

/* The circles of a page. For K each row r is a circle of words, one word per unit. For V each unit
 * is a circle of words, one word per row r of all row groups. */
typedef struct circle_shape {
    bool key;
    uint32_t bits, units, n; /* n: words of a circle */
    /* The first word follows word n - 1 where whole has ones; elsewhere the circle is shorter, and
     * it follows word n - 1 - shorter. */
    uint32_t shorter;
    vi whole;
} circle_shape;

/* Word i of a circle in a plane. */
KVANT_INLINE const uint32_t *word_at(const level_job *job, bool key, uint32_t plane,
                                     uint32_t circle, uint32_t i)
{
    const uint32_t unit = key ? i : circle, r = key ? circle : i % 8, group = key ? 0 : i / 8;
    return job->planes[group][plane] + 128 * (plane ? unit / 2 : unit) + 16 * r;
}

/* The word i steps before the first word. last: the word i steps before the end of a circle;
 * shorter: the same for circles that are shorter. */
KVANT_INLINE row_words word_before(const circle_shape *shape, row_words last, row_words shorter)
{
#pragma GCC unroll 2
    for (uint32_t v = 0; v < ROW_VECTORS; v++)
        if (shape->shorter)
            last.at[v] = vi_select(shape->whole, last.at[v], shorter.at[v]);
    return shape->key ? key_fields_before(last, shape->bits)
                      : value_fields_before(last, shape->bits);
}

KVANT_INLINE void make_word_levels(const level_job *job, const level_tables *tables,
                                   const circle_shape *shape, const row_words *step,
                                   uint32_t circle, uint32_t i)
{
    const uint32_t bits = shape->bits;
    const uint32_t unit = shape->key ? i : circle, r = shape->key ? circle : i;
    uint8_t *out =
        job->tile->at + (size_t)64 * (8 / first_plane(bits)) * ((size_t)r * shape->units + unit);
#pragma GCC unroll 2
    for (uint32_t v = 0; v < ROW_VECTORS; v++) {
        const vi more = bits == 3
                            ? third_bits(word_at(job, shape->key, 1, circle, i) + LANES * v, unit)
                            : step->at[v];
        store_levels(tables, bits, step, v, more, out + 4 * LANES * v);
    }
}

#if LANES > 4
/* Computes the levels of circles of blocks of at most 8 words: the block and the words before it
 * stay in registers. */
KVANT_INLINE void make_block_levels(const level_job *job, const circle_shape *shape,
                                    uint32_t n_circles, uint32_t block)
{
    const level_tables tables = load_levels(job->trellis->in_words);
    const uint32_t m = KVANT_TRELLIS_MEMORY;
    for (uint32_t circle = 0; circle < n_circles; circle++) {
        row_words at[KVANT_TRELLIS_MEMORY + 8];
        unrolled_for (uint32_t i = 0; i < block; i++)
            at[m + i] = load_row(word_at(job, shape->key, 0, circle, shape->n - block + i));
        unrolled_for (uint32_t i = m; i-- > 0;) {
            const row_words last = at[i + block];
            const row_words other = shape->shorter
                                        ? load_row(word_at(job, shape->key, 0, circle,
                                                           shape->n - shape->shorter - m + i))
                                        : last;
            at[i] = word_before(shape, last, other);
        }
        for (uint32_t first = 0; first < shape->n; first += block) {
            unrolled_for (uint32_t i = 0; i < block; i++)
                at[m + i] = load_row(word_at(job, shape->key, 0, circle, first + i));
            unrolled_for (uint32_t i = 0; i < block; i++)
                make_word_levels(job, &tables, shape, &at[m + i], circle, first + i);
            unrolled_for (uint32_t i = 0; i < m; i++)
                at[i] = at[i + block];
        }
    }
}
#endif

KVANT_INLINE void make_circle_levels(const level_job *job, const circle_shape *shape,
                                     uint32_t n_circles)
{
    const uint32_t m = KVANT_TRELLIS_MEMORY;
    const level_tables tables = load_levels(job->trellis->in_words);
    for (uint32_t circle = 0; circle < n_circles; circle++) {
        row_words at[KVANT_TRELLIS_MEMORY + KVANT_MAX_HEAD_DIM / 8];
        for (uint32_t i = 0; i < shape->n; i++)
            at[m + i] = load_row(word_at(job, shape->key, 0, circle, i));
        for (uint32_t i = m; i-- > 0;)
            at[i] = word_before(shape, at[i + shape->n], at[i + shape->n - shape->shorter]);
        for (uint32_t i = 0; i < shape->n; i++)
            make_word_levels(job, &tables, shape, &at[m + i], circle, i);
    }
}

/* With an odd number of column tiles, the last unit lacks every second field. The last row group
 * may lack tiles. Circles without such fields or tiles are shorter. */
KVANT_INLINE void make_role_levels(const level_job *job, uint32_t bits, bool key)
{
    const uint32_t tiles = job->layout->row_tiles;
    const uint32_t whole[4] = { UINT32_MAX, tiles % 4 != 1 ? UINT32_MAX : 0,
                                tiles % 4 == 3 ? UINT32_MAX : 0, 0 };
    const uint32_t units =
        key ? job->layout->planes[0].units : first_plane(bits); /* of 64 tokens */
    const uint32_t shorter = key ? bits != 4 && job->layout->column_tiles % 2 : tiles % 4 ? 8 : 0;
    const circle_shape any = { key,     bits,
                               units,   key ? units : 8 * ((tiles + 3) / 4),
                               shorter, key ? vi_set(0x00ff00ff) : vi_load_repeated(whole, 4) };
    const uint32_t n_circles = key ? 8 : units;
#if LANES == 4 /* with 128-bit vectors the words of a circle do not fit the registers */
    make_circle_levels(job, &any, n_circles);
#else
    const circle_shape two = { key, bits, 2, 2, 0, vi_set(0) },
                       four = { key, bits, 4, 4, 0, vi_set(0) },
                       eight = { key, bits, key ? 8 : units, 8, 0, vi_set(0) };
    if (key && (shorter || (units != 2 && units != 4 && units % 8)))
        make_circle_levels(job, &any, n_circles);
    else if (key && units == 2)
        make_block_levels(job, &two, 8, 2);
    else if (key && units == 4)
        make_block_levels(job, &four, 8, 4);
    else if (LANES == 16 && any.n == 8 && !shorter)
        make_block_levels(job, &eight, n_circles, 8);
    else
        make_block_levels(job, &any, n_circles, 8);
#endif
}

KVANT_INLINE void make_levels_bits(const level_job *job, uint32_t bits)
{
    if (job->layout->role == KVANT_ROLE_K)
        make_role_levels(job, bits, true);
    else
        make_role_levels(job, bits, false);
}

/* Computes the levels of a page into the tile. Not inlined, like multiply_levels: then both
 * functions use the same part of the stack one after another, which keeps attention within 64
 * KiB. */
static KVANT_NOINLINE void NAME(make_levels)(level_job *job, const void *page)
{
    _Alignas(64) uint32_t words[KVANT_WHOLE_GROUP_WORDS];
    const kvant_layout *layout = job->layout;
    for (uint32_t group = 0; 4 * group < layout->row_tiles; group++)
        for (uint32_t i = 0; i < layout->n_planes; i++)
            job->planes[group][i] = (const uint32_t *)page + layout->planes[i].word_offset +
                                    (size_t)128 * group * layout->planes[i].units;
    if (layout->row_tiles % 4)
        kvant_whole_group(layout, page, layout->row_tiles / 4, words,
                          job->planes[layout->row_tiles / 4]);
    switch (layout->bits) {
    case 2: make_levels_bits(job, 2); return;
    case 3: make_levels_bits(job, 3); return;
    default: make_levels_bits(job, 4); return;
    }
}

/* The numbers of x that a vector of the tile is multiplied by: [0] for its even bytes, [1] for its
 * odd bytes. */
typedef struct level_operand {
    vi at[MAX_UNITS][2][ROW_VECTORS];
    vi bias;
} level_operand;

/* Prepares the operands of a vector x. Operand o belongs to the o-th pair of byte vectors of a row
 * r. With 4 bits that is a column tile; with fewer bits it is one side (the lower or upper 8
 * columns) of two column tiles. Lane q holds columns 2 q and 2 q + 1 of a side. The bias is spread
 * over the lanes. */
KVANT_INLINE void spread_levels(uint32_t bits, uint32_t n_operands, const int16_t *x,
                                level_operand *out)
{
    static const uint32_t pairs[4] = { 0x09080100, 0x0b0a0302, 0x0d0c0504, 0x0f0e0706 };
    const vi bias = vi_set((int)(0x10000u * (uint16_t)-LEVEL_BIAS + (uint16_t)-LEVEL_BIAS));
    vi sum = vi_set(0);
    for (uint32_t first = 0; first < n_operands; first += 4)
#pragma GCC unroll 8
        for (uint32_t part = 0; part < 2 * ROW_VECTORS; part++) {
            const uint32_t side = part / ROW_VECTORS, v = part % ROW_VECTORS;
            const vi columns = vi_load(x + KVANT_PAGE_TOKENS / 4 * first + 2 * LANES * part);
            sum = add_pairs(sum, bias, columns);
            for (uint32_t ct = 0; ct < 4; ct++)
                out->at[first + (bits == 4 ? ct : ct / 2 * 2 + side)][bits == 4 ? side : ct % 2]
                       [v] = vi_pick_bytes(columns, vi_set((int)pairs[ct]));
        }
    sum = vi_add(sum, vi_rotate_four(sum));
    out->bias = vi_add(sum, vi_rotate_four(vi_rotate_four(sum)));
}

/* Multiplies four rows of a row group by up to LEVEL_ROWS vectors x: rows r ... r + 3, with r below
 * 8 or from 8 on. */
KVANT_INLINE void dot_four(const uint8_t *tile, uint32_t n_operands, const level_operand *x,
                           uint32_t rows, int32_t *dots, size_t stride)
{
    vi sum[LEVEL_ROWS][4];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < rows; i++)
        sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = x[i].bias;
    each_operand(uint32_t o = 0; o < n_operands; o++)
#pragma GCC unroll 2
        for (uint32_t v = 0; v < ROW_VECTORS; v++) for (uint32_t r = 0; r < 4; r++)
    {
        const vi levels = vi_load(tile + (size_t)128 * (r * n_operands + o) + 4 * LANES * v);
        const vi even = vi_and(levels, vi_set(0x00ff00ff)), odd = vi_odd_bytes(levels);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < rows; i++)
            sum[i][r] =
                add_pairs(add_pairs(sum[i][r], even, x[i].at[o][0][v]), odd, x[i].at[o][1][v]);
    }
#pragma GCC unroll 8
    for (uint32_t i = 0; i < rows; i++)
        store_lane_sums(dots + i * stride, sum[i]);
}

KVANT_INLINE void dot_levels(const level_job *job, uint32_t n_operands, const level_operand *x,
                             uint32_t rows, int32_t *dots, size_t stride)
{
    for (uint32_t group = 0; 4 * group < job->layout->row_tiles; group++)
        for (uint32_t quad = 0; quad < 2; quad++)
            for (uint32_t half = 0; half < 2; half++)
                dot_four(job->tile->at + (size_t)128 * n_operands * (8 * group + 4 * quad) +
                             64 * half,
                         n_operands, x, rows,
                         dots + KVANT_PAGE_TOKENS * group + 32 * half + 16 * quad, stride);
}

static KVANT_NOINLINE void NAME(multiply_levels)(const level_job *job, const int16_t *x,
                                                 size_t x_stride, int32_t *dots, size_t dots_stride,
                                                 uint32_t n)
{
    const kvant_layout *layout = job->layout;
    const uint32_t bits = layout->bits;
    const uint32_t n_operands = bits == 4 ? layout->column_tiles : 2 * layout->planes[0].units;
    for (uint32_t first = 0; first < n; first += LEVEL_ROWS) {
        level_operand operands[LEVEL_ROWS];
        const uint32_t rows = n - first < LEVEL_ROWS ? n - first : LEVEL_ROWS;
        for (uint32_t i = 0; i < rows; i++)
            spread_levels(bits, n_operands, x + (first + i) * x_stride, &operands[i]);
        int32_t *out = dots + first * dots_stride;
#define DOT_LEVELS(rows) dot_levels(job, n_operands, operands, rows, out, dots_stride)
        KVANT_CALL_CONSTANT(rows, LEVEL_ROWS, DOT_LEVELS)
    }
}

static KVANT_TRELLIS_DOTS_FN(NAME(trellis_dots))
{
    level_tile tile;
    level_job job = { .trellis = trellis, .layout = layout, .tile = &tile };
    if (layout->role == KVANT_ROLE_V
            ? layout->row_tiles < 4
            : layout->column_tiles < 2) { /* the page has lanes or fields without a step */
        kvant_trellis_dots_c(trellis, layout, page, x, x_stride, dots, dots_stride, n);
        return;
    }
    NAME(make_levels)(&job, page);
    NAME(multiply_levels)(&job, x, x_stride, dots, dots_stride, n);
}
