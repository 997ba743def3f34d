/* blocks_template.h - attention on rows of ggml's block formats, for any vector width. The file of
 * a level includes it before simd_template.h and after the level's block_* functions (blocks_ymm.h,
 * blocks_zmm.h).
 *
 * Numbers are made in registers, 16 at a time, and serve up to 4 query rows. Only pages for many
 * query rows are written to memory, as tiles. Every function is compiled once per format, so
 * branches on the format cost nothing. */
#define PART_VECTORS (KVANT_BLOCK_PART / LANES)

/* The data that all parts of a call share. */
typedef struct block_reader {
    kvant_block_format format;
    block_table table;
} block_reader;

KVANT_INLINE block_reader block_reader_of(kvant_block_type type)
{
    static const int8_t counting[3][16] = {
        { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 },
        { -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7 },
        { -16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1 }
    };
    const int8_t *values = type == KVANT_BLOCK_IQ4_NL ? kvant_iq4_nl_values
                           : type == KVANT_BLOCK_Q4_0 ? counting[1]
                           : type == KVANT_BLOCK_Q5_0 ? counting[2]
                                                      : counting[0];
    return (block_reader){ kvant_block_format_of(type), block_table_load(values) };
}

/* Decodes n parts, 1 or 2, of a row from part `first` on; two parts of a block share one scale. */
KVANT_INLINE void block_parts(kvant_block_type type, const block_reader *reader, const uint8_t *row,
                              uint32_t first, uint32_t n, vf *x)
{
    kvant_block_format format = reader->format;
    if (format.numbers == KVANT_BLOCK_PART) {
        for (uint32_t i = 0; i < n; i++)
            block_floats(type, row + (size_t)(first + i) * format.bytes, x + i * PART_VECTORS);
        return;
    }
    const uint8_t *block = row + (size_t)(first / 2) * format.bytes;
    vf scale = block_half(block), min = format.has_min ? block_half(block + 2) : vf_zero();
    for (uint32_t i = 0; i < n; i++)
        block_codes(type, format, &reader->table, block, (first + i) % 2, x + i * PART_VECTORS);
    for (uint32_t i = 0; i < n * PART_VECTORS; i++)
        x[i] = format.has_min ? vf_fma(x[i], scale, min) : vf_mul(x[i], scale);
}

/* Scores 4 tokens. Tokens beyond the last repeat the last token. */
KVANT_INLINE void block_scores_4(kvant_block_type type, const block_reader *reader,
                                 const kvant_block_page *page, uint32_t t, const float *q,
                                 size_t q_stride, float *scores, uint32_t rows)
{
    vf sums[4][4], x[2 * PART_VECTORS];
    const uint8_t *row[4];
    uint32_t parts = page->head_dim / KVANT_BLOCK_PART,
             step = reader->format.numbers / KVANT_BLOCK_PART;
    for (uint32_t j = 0; j < 4; j++)
        row[j] = page->rows + (t + j < page->n_tokens ? t + j : page->n_tokens - 1) * page->stride;
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t j = 0; j < 4; j++)
            sums[i][j] = vf_zero();
    for (uint32_t part = 0; part < parts; part += step)
        unrolled_for (uint32_t j = 0; j < 4; j++) {
            block_parts(type, reader, row[j], part, step, x);
            unrolled_for (uint32_t v = 0; v < step * PART_VECTORS; v++)
                unrolled_for (uint32_t i = 0; i < rows; i++)
                    sums[i][j] = vf_fma(
                        x[v], vf_load(q + i * q_stride + part * KVANT_BLOCK_PART + v * LANES),
                        sums[i][j]);
        }
    unrolled_for (uint32_t i = 0; i < rows; i++)
        _mm_store_ps(scores + i * KVANT_PAGE_TOKENS + t, vf_sums_of_4(sums[i]));
}

KVANT_INLINE void block_scores_rows(kvant_block_type type, const kvant_block_page *page,
                                    const float *q, size_t q_stride, float *scores, uint32_t rows)
{
    block_reader reader = block_reader_of(type);
    for (uint32_t t = 0; t < page->n_tokens; t += 4)
        block_scores_4(type, &reader, page, t, q, q_stride, scores, rows);
}

/* Adds n parts of the channels to the sums. */
KVANT_INLINE void block_sums_parts(kvant_block_type type, const block_reader *reader,
                                   const kvant_block_page *page, const float *w, float *sums,
                                   size_t stride, uint32_t rows, uint32_t first, uint32_t n)
{
    vf total[4][2 * PART_VECTORS], x[2 * PART_VECTORS];
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t v = 0; v < n * PART_VECTORS; v++)
            total[i][v] = vf_load(sums + i * stride + first * KVANT_BLOCK_PART + v * LANES);
    for (uint32_t t = 0; t < page->n_tokens; t++) {
        float any = w[t];
        unrolled_for (uint32_t i = 1; i < rows; i++)
            any += w[i * KVANT_PAGE_TOKENS + t];
        if (any == 0)
            continue;
        block_parts(type, reader, page->rows + t * page->stride, first, n, x);
        unrolled_for (uint32_t i = 0; i < rows; i++) {
            vf factor = vf_set(w[i * KVANT_PAGE_TOKENS + t]);
            unrolled_for (uint32_t v = 0; v < n * PART_VECTORS; v++)
                total[i][v] = vf_fma(factor, x[v], total[i][v]);
        }
    }
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t v = 0; v < n * PART_VECTORS; v++)
            vf_store(sums + i * stride + first * KVANT_BLOCK_PART + v * LANES, total[i][v]);
}

/* With 16 registers, sums of two parts for 4 rows would spill. */
KVANT_INLINE void block_sums_rows(kvant_block_type type, const kvant_block_page *page,
                                  const float *w, float *sums, size_t stride, uint32_t rows)
{
    block_reader reader = block_reader_of(type);
    uint32_t parts = page->head_dim / KVANT_BLOCK_PART, part = 0;
    if (LANES == 16)
        for (; part + 2 <= parts; part += 2)
            block_sums_parts(type, &reader, page, w, sums, stride, rows, part, 2);
    if (LANES != 16 || reader.format.numbers == KVANT_BLOCK_PART)
        for (; part < parts; part++)
            block_sums_parts(type, &reader, page, w, sums, stride, rows, part, 1);
}

KVANT_INLINE void block_rows_tile(kvant_block_type type, const kvant_block_page *page, float *tile)
{
    block_reader reader = block_reader_of(type);
    uint32_t parts = page->head_dim / KVANT_BLOCK_PART,
             step = reader.format.numbers / KVANT_BLOCK_PART;
    vf x[2 * PART_VECTORS];
    for (uint32_t t = 0; t < page->n_tokens; t++)
        for (uint32_t part = 0; part < parts; part += step) {
            block_parts(type, &reader, page->rows + t * page->stride, part, step, x);
            for (uint32_t v = 0; v < step * PART_VECTORS; v++)
                vf_store(tile + (size_t)t * page->head_dim + part * KVANT_BLOCK_PART + v * LANES,
                         x[v]);
        }
    memset(tile + (size_t)page->n_tokens * page->head_dim, 0,
           (size_t)(KVANT_PAGE_TOKENS - page->n_tokens) * page->head_dim * sizeof *tile);
}

/* out[c][0 .. LANES - 1] = in[0 .. LANES - 1][c] for 4 columns c. The loads put the rows into the
 * 128-bit lanes in such an order that a 4 x 4 transpose within each lane suffices. */
KVANT_INLINE void block_transpose(const float *in, size_t in_stride, float *out, size_t out_stride)
{
    vf r[4], low[2], high[2];
    for (uint32_t i = 0; i < 4; i++)
        r[i] = vf_load_strided(in + i * in_stride, 4 * in_stride);
    low[0] = vf_unpack_low(r[0], r[1]);
    low[1] = vf_unpack_low(r[2], r[3]);
    high[0] = vf_unpack_high(r[0], r[1]);
    high[1] = vf_unpack_high(r[2], r[3]);
    vf_store(out, vf_low_halves(low[0], low[1]));
    vf_store(out + out_stride, vf_high_halves(low[0], low[1]));
    vf_store(out + 2 * out_stride, vf_low_halves(high[0], high[1]));
    vf_store(out + 3 * out_stride, vf_high_halves(high[0], high[1]));
}

KVANT_INLINE void block_columns_tile(kvant_block_type type, const kvant_block_page *page,
                                     float *tile)
{
    block_reader reader = block_reader_of(type);
    uint32_t parts = page->head_dim / KVANT_BLOCK_PART,
             step = reader.format.numbers / KVANT_BLOCK_PART;
    uint32_t columns = step * KVANT_BLOCK_PART;
    _Alignas(64) float rows[LANES * 2 * KVANT_BLOCK_PART];
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t += LANES)
        for (uint32_t part = 0; part < parts; part += step) {
            for (uint32_t j = 0; j < LANES; j++) {
                vf x[2 * PART_VECTORS];
                for (uint32_t v = 0; v < step * PART_VECTORS; v++)
                    x[v] = vf_zero();
                if (t + j < page->n_tokens)
                    block_parts(type, &reader, page->rows + (t + j) * page->stride, part, step, x);
                for (uint32_t v = 0; v < step * PART_VECTORS; v++)
                    vf_store(rows + j * columns + v * LANES, x[v]);
            }
            for (uint32_t c = 0; c < columns; c += 4)
                block_transpose(rows + c, columns,
                                tile + (size_t)(part * KVANT_BLOCK_PART + c) * KVANT_PAGE_TOKENS +
                                    t,
                                KVANT_PAGE_TOKENS);
        }
}

#define EACH_BLOCK_TYPE(type, DO)                                                                  \
    switch (type) {                                                                                \
    case KVANT_BLOCK_F32: DO(KVANT_BLOCK_F32); break;                                              \
    case KVANT_BLOCK_F16: DO(KVANT_BLOCK_F16); break;                                              \
    case KVANT_BLOCK_BF16: DO(KVANT_BLOCK_BF16); break;                                            \
    case KVANT_BLOCK_Q4_0: DO(KVANT_BLOCK_Q4_0); break;                                            \
    case KVANT_BLOCK_Q4_1: DO(KVANT_BLOCK_Q4_1); break;                                            \
    case KVANT_BLOCK_Q5_0: DO(KVANT_BLOCK_Q5_0); break;                                            \
    case KVANT_BLOCK_Q5_1: DO(KVANT_BLOCK_Q5_1); break;                                            \
    case KVANT_BLOCK_Q8_0: DO(KVANT_BLOCK_Q8_0); break;                                            \
    case KVANT_BLOCK_IQ4_NL: DO(KVANT_BLOCK_IQ4_NL); break;                                        \
    }

KVANT_INLINE void block_scores_some(const kvant_block_page *page, const float *q, size_t q_stride,
                                    float *scores, uint32_t rows)
{
#define SCORES_OF_TYPE(type) block_scores_rows(type, page, q, q_stride, scores, rows)
    EACH_BLOCK_TYPE(page->type, SCORES_OF_TYPE)
}

static KVANT_BLOCK_SCORES_FN(NAME(block_scores))
{
#define SCORES_OF_ROWS(rows)                                                                       \
    block_scores_some(page, q + i * q_stride, q_stride, scores + i * KVANT_PAGE_TOKENS, rows)
    for (uint32_t i = 0; i < n; i += 4)
        KVANT_CALL_CONSTANT(n - i < 4 ? n - i : 4, 4, SCORES_OF_ROWS)
}

KVANT_INLINE void block_sums_some(const kvant_block_page *page, const float *w, float *sums,
                                  size_t stride, uint32_t rows)
{
#define SUMS_OF_TYPE(type) block_sums_rows(type, page, w, sums, stride, rows)
    EACH_BLOCK_TYPE(page->type, SUMS_OF_TYPE)
}

static KVANT_BLOCK_SUMS_FN(NAME(block_sums))
{
#define SUMS_OF_ROWS(rows)                                                                         \
    block_sums_some(page, w + i * KVANT_PAGE_TOKENS, sums + i * sums_stride, sums_stride, rows)
    for (uint32_t i = 0; i < n; i += 4)
        KVANT_CALL_CONSTANT(n - i < 4 ? n - i : 4, 4, SUMS_OF_ROWS)
}

#define ROWS_TILE(type) block_rows_tile(type, page, tile)

static KVANT_BLOCK_TILE_FN(NAME(block_rows_tile))
{
    EACH_BLOCK_TYPE(page->type, ROWS_TILE)
}

#define COLUMNS_TILE(type) block_columns_tile(type, page, tile)

static KVANT_BLOCK_TILE_FN(NAME(block_columns_tile))
{
    EACH_BLOCK_TYPE(page->type, COLUMNS_TILE)
}
