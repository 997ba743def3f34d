/* tile_sums_template.h - sums of codes and integers for many vectors x.
 *
 * Codes are unpacked once, to a tile of 16-bit pairs of neighbouring columns. All vectors x use the
 * tile, in blocks of TILE_ROWS vectors. The dots of a block stay in registers until they become
 * sums. The including file defines
 *
 *   NAME, vi, vi_set, vi_load, add_pairs(sum, a, b), and the definitions for code_sums.h
 *   LANES, TILE_VECTORS, TILE_ROWS        32-bit lanes of a vector. TILE_ROWS x TILE_VECTORS sums,
 *                                         TILE_VECTORS of the tile and the temporaries of a product
 *                                         must fit the registers
 *   vi_store_aligned(p, v)
 *   vi_pair_words(v)                      each 8 numbers a0 .. a3 b0 .. b3 as the pairs
 *                                         (a0, b0) .. (a3, b3)
 *   make_pairs(planes, bits, ct, tables, pairs)   of a column tile; bits is a constant
 *
 * and everything that code_dots_rows.h asks for. */

#include "code_sums.h"

/* Column tiles of a piece. The tile then has 16 KB, so the nearest cache holds it and the numbers x
 * of a work item. */
#define TILE_COLUMN_TILES 8u

/* Each pair is columns 2q and 2q + 1 of column tile ct, or the columns 8 further (h = 1). Its index
 * is 16 (2 (ct / 4) + h) + 4 q + ct mod 4, which is the order of x. Rows lie in the order of
 * positions. */
typedef struct pair_tile {
    _Alignas(64) int32_t at[8 * TILE_COLUMN_TILES][KVANT_PAGE_TOKENS];
} pair_tile;

typedef struct pair_rows {
    _Alignas(64) int32_t at[TILE_ROWS][8 * TILE_COLUMN_TILES];
} pair_rows;

/* Column tiles first .. end - 1 of a piece. */
typedef struct tile_range {
    uint32_t first, end;
} tile_range;

KVANT_INLINE void pair_columns(const int16_t *x, size_t x_stride, uint32_t rows, tile_range range,
                               pair_rows *out)
{
    uint32_t n = (range.end + 3) / 4 * KVANT_PAGE_TOKENS;
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t j = 0; j < n; j += 2 * LANES)
            vi_store_aligned(out->at[i] + j / 2, vi_pair_words(vi_load(x + i * x_stride + j)));
}

KVANT_INLINE void add_column_pair(const pair_tile *tile, uint32_t position, const pair_rows *x,
                                  uint32_t pair, uint32_t rows, vi sum[TILE_ROWS][TILE_VECTORS])
{
    vi column[TILE_VECTORS];
    unrolled_for (uint32_t j = 0; j < TILE_VECTORS; j++)
        column[j] = vi_load(tile->at[pair] + position + LANES * j);
    unrolled_for (uint32_t i = 0; i < rows; i++) {
        vi factor = vi_set(x->at[i][pair]);
        unrolled_for (uint32_t j = 0; j < TILE_VECTORS; j++)
            sum[i][j] = add_pairs(sum[i][j], column[j], factor);
    }
}

/* Multiplies the pairs of a block of 4 column tiles, as far as the range has them. */
KVANT_INLINE void add_block(const pair_tile *tile, uint32_t position, const pair_rows *x,
                            uint32_t block, tile_range range, uint32_t rows,
                            vi sum[TILE_ROWS][TILE_VECTORS])
{
    uint32_t first = range.first > 4 * block ? range.first - 4 * block : 0,
             left = range.end - 4 * block, end = left < 4 ? left : 4;
    if (end - first == 4) {
        for (uint32_t pair = 32 * block; pair < 32 * (block + 1); pair++)
            add_column_pair(tile, position, x, pair, rows, sum);
        return;
    }
    for (uint32_t i = 0; i < 8; i++)
        for (uint32_t j = first; j < end; j++)
            add_column_pair(tile, position, x, 32 * block + 4 * i + j, rows, sum);
}

/* The place for the dots of a block of vectors. When the columns of a row group come in several
 * pieces, dots holds the sums of earlier pieces. */
typedef struct tile_target {
    /* more: dots already has the sums of earlier pieces; last: this is the last piece */
    bool more, last;
    int32_t *dots;
    size_t dots_stride;
    const kvant_code_sums *out;
    size_t row, band; /* the first row and the first band of the group */
} tile_target;

KVANT_INLINE void store_dots(vi dots[TILE_ROWS][TILE_VECTORS], uint32_t first, uint32_t rows,
                             uint32_t position, const tile_target *to)
{
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t j = 0; j < TILE_VECTORS; j++)
            vi_store_aligned(to->dots + (first + i) * to->dots_stride + position + LANES * j,
                             dots[i][j]);
}

KVANT_INLINE void store_sums(vi dots[TILE_ROWS][TILE_VECTORS], uint32_t first, uint32_t rows,
                             uint32_t position, const tile_target *to, const kvant_code_sums *out)
{
    unrolled_for (uint32_t i = 0; i < rows; i++) {
        size_t band = (first + i) * out->n_bands + to->band;
        vf step = vf_set(out->steps[band]), offset = vf_set(out->offsets ? out->offsets[band] : 0);
        float *sums = out->sums + (first + i) * out->stride + to->row + position;
        unrolled_for (uint32_t j = 0; j < TILE_VECTORS; j++)
            vf_store(sums + LANES * j, code_sum(dots[i][j], step, offset, out,
                                                to->row + position + LANES * j, sums + LANES * j));
    }
}

/* Calls the same function in three branches, so that the compiler removes the tests of scale, zero
 * and add from the loop over vectors. The branches are for values, for keys with lines by row, and
 * for everything else. */
KVANT_INLINE void finish_block(vi dots[TILE_ROWS][TILE_VECTORS], uint32_t first, uint32_t rows,
                               uint32_t position, const tile_target *to)
{
    kvant_code_sums out = *to->out;
    if (!to->last)
        store_dots(dots, first, rows, position, to);
    else if (!out.scale && !out.zero && out.add)
        store_sums(dots, first, rows, position, to, &out);
    else if (out.scale && !out.zero && !out.add)
        store_sums(dots, first, rows, position, to, &out);
    else
        store_sums(dots, first, rows, position, to, &out);
}

/* Computes all positions for one block of vectors. */
KVANT_INLINE void tile_block(const pair_tile *tile, uint32_t position, const pair_rows *x,
                             tile_range range, uint32_t first, uint32_t rows, const tile_target *to)
{
    vi sum[TILE_ROWS][TILE_VECTORS];
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t j = 0; j < TILE_VECTORS; j++)
            sum[i][j] =
                to->more ? vi_load(to->dots + (first + i) * to->dots_stride + position + LANES * j)
                         : vi_set(0);
    for (uint32_t block = range.first / 4; 4 * block < range.end; block++)
        add_block(tile, position, x, block, range, rows, sum);
    finish_block(sum, first, rows, position, to);
}

KVANT_INLINE void tile_rows(const pair_tile *tile, tile_range range, const int16_t *x,
                            size_t x_stride, uint32_t first, uint32_t rows, const tile_target *to)
{
    pair_rows pairs;
    pair_columns(x + first * x_stride, x_stride, rows, range, &pairs);
    for (uint32_t position = 0; position < KVANT_PAGE_TOKENS; position += LANES * TILE_VECTORS)
        tile_block(tile, position, &pairs, range, first, rows, to);
}

static void tile_piece(const pair_tile *tile, tile_range range, const int16_t *x, size_t x_stride,
                       const tile_target *to, uint32_t n)
{
    uint32_t first = 0;
    for (; first + TILE_ROWS <= n; first += TILE_ROWS)
        tile_rows(tile, range, x, x_stride, first, TILE_ROWS, to);
#define LAST_TILE_ROWS(rows) tile_rows(tile, range, x, x_stride, first, rows, to)
    KVANT_CALL_CONSTANT(n - first, 5, LAST_TILE_ROWS)
}

/* Makes the tile of a piece, whose first column tile is `piece`. */
static void make_tile(const uint32_t *const *planes, uint32_t bits, const dot_tables *tables,
                      uint32_t piece, tile_range range, pair_tile *tile)
{
#define MAKE_TILE(bits)                                                                            \
    for (uint32_t i = range.first; i < range.end; i++)                                             \
    make_pairs(planes, bits, piece + i, tables, tile->at + 32 * (i / 4) + i % 4)
    KVANT_CALL_CONSTANT(bits, 8, MAKE_TILE)
}

/* Computes the sums of one row group. The sums of a group of fewer than 4 tiles lie in another
 * order, so its dots are stored first. */
KVANT_INLINE void tile_group(const kvant_layout *layout, const uint32_t *const *planes,
                             const dot_tables *tables, const kvant_code_factors *factors,
                             const int16_t *x, tile_target *to, bool whole, uint32_t n)
{
    pair_tile tile;
    to->more = false;
    for (uint32_t piece = factors->first / 4 * 4; piece < factors->end;
         piece += TILE_COLUMN_TILES) {
        uint32_t left = factors->end - piece;
        tile_range range = { factors->first > piece ? factors->first - piece : 0,
                             left < TILE_COLUMN_TILES ? left : TILE_COLUMN_TILES };
        to->last = whole && left <= TILE_COLUMN_TILES;
        make_tile(planes, layout->bits, tables, piece, range, &tile);
        tile_piece(&tile, range, x + KVANT_TILE * piece, factors->stride, to, n);
        to->more = true;
    }
}

static KVANT_TILE_SUMS_FN(NAME(tile_sums))
{
    dot_tables tables = load_tables(values);
    _Alignas(64) uint32_t words[KVANT_WHOLE_GROUP_WORDS];
    const uint32_t *planes[KVANT_MAX_PLANES];
    for (uint32_t group = 0; 4 * group < layout->row_tiles; group++) {
        const int16_t *x = factors->x + 4 * group / factors->band_tiles * factors->band_stride;
        bool whole = kvant_layout_group_tiles(layout, group) == 4;
        tile_target to = { .dots = dots,
                           .dots_stride = dots_stride,
                           .out = out,
                           .row = (size_t)KVANT_PAGE_TOKENS * group,
                           .band = 4 * group / out->band_tiles };
        find_planes(layout, page, group, words, planes);
        tile_group(layout, planes, &tables, factors, x, &to, whole, n);
        for (uint32_t i = 0; i < n && !whole; i++)
            kvant_sum_group_c(layout, group, dots + i * dots_stride, out, i);
    }
}
