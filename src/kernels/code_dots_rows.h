/* code_dots_rows.h - code_dots around the loops of a vector width.
 *
 * Multiplies vectors x in blocks of DOT_ROWS, and rows in groups of four tiles. The including file
 * defines
 *
 *   dot_operand          integers of the columns, arranged as the lanes of words need them
 *   dot_tables           values of the digits of codes
 *   load_tables(values)
 *   spread_columns(bands, first, end, out)   bands: x of each of the four row tiles
 *   dot_group(planes, bits, tables, operands, columns, rows, dots, stride)
 *                        one row group; bits and rows are constants */

typedef struct dot_job {
    const kvant_layout *layout;
    const void *page;
    const int16_t *values;
    const kvant_code_factors *factors;
    int32_t *dots;
    size_t stride;
} dot_job;

/* Finds the integers of a vector for the four row tiles of a group. Missing row tiles get the
 * integers of the last one. */
KVANT_INLINE void find_bands(const dot_job *job, uint32_t i, uint32_t group, bool one_band,
                             const int16_t *bands[4])
{
    const kvant_code_factors *factors = job->factors;
    for (uint32_t k = 0; k < 4; k++) {
        uint32_t rt =
            4 * group + k < job->layout->row_tiles ? 4 * group + k : job->layout->row_tiles - 1;
        uint32_t band = one_band ? 0 : rt / factors->band_tiles;
        bands[k] = factors->x + i * factors->stride + band * factors->band_stride;
    }
}

/* Finds the planes of a row group of 4 tiles: in the page, or as words that extend a smaller
 * group. */
KVANT_INLINE void find_planes(const kvant_layout *layout, const void *page, uint32_t group,
                              uint32_t *words, const uint32_t **planes)
{
    if (kvant_layout_group_tiles(layout, group) < 4) {
        kvant_whole_group(layout, page, group, words, planes);
        return;
    }
    for (uint32_t i = 0; i < layout->n_planes; i++)
        planes[i] = (const uint32_t *)page + layout->planes[i].word_offset +
                    (size_t)128 * group * layout->planes[i].units;
}

KVANT_INLINE void dot_rows(const dot_job *job, uint32_t bits, uint32_t first, uint32_t rows)
{
    _Alignas(64) uint32_t words[KVANT_WHOLE_GROUP_WORDS];
    const uint32_t *planes[KVANT_MAX_PLANES];
    dot_operand operands[DOT_ROWS];
    dot_tables tables = load_tables(job->values);
    bool one_band = job->factors->band_tiles >= job->layout->row_tiles;
    for (uint32_t group = 0; 4 * group < job->layout->row_tiles; group++) {
        for (uint32_t i = 0; i < rows && !(one_band && group); i++) {
            const int16_t *bands[4];
            find_bands(job, first + i, group, one_band, bands);
            spread_columns(bands, job->factors->first, job->factors->end, &operands[i]);
        }
        find_planes(job->layout, job->page, group, words, planes);
        dot_group(planes, bits, &tables, operands, job->factors, rows,
                  job->dots + first * job->stride + KVANT_PAGE_TOKENS * group, job->stride);
    }
}

KVANT_INLINE void dot_bits(const dot_job *job, uint32_t bits, uint32_t n)
{
    uint32_t first = 0;
    for (; first + DOT_ROWS <= n; first += DOT_ROWS)
        dot_rows(job, bits, first, DOT_ROWS);
#define LAST_DOT_ROWS(rows) dot_rows(job, bits, first, rows)
    KVANT_CALL_CONSTANT(n - first, 3, LAST_DOT_ROWS)
}

static KVANT_CODE_DOTS_FN(NAME(code_dots))
{
    dot_job job = { layout, page, values, factors, dots, dots_stride };
#define DOTS_OF_BITS(bits) dot_bits(&job, bits, n)
    KVANT_CALL_CONSTANT(layout->bits, 8, DOTS_OF_BITS)
}
