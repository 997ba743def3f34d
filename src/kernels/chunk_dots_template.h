/* chunk_dots_template.h - products of chunk codes and integers, for any vector width.
 *
 * Sixteen chunks at a time become a tile of pairs of 16-bit numbers. All vectors x use the tile, in
 * blocks of CHUNK_ROWS vectors.
 *
 * A word has two codes, 16 bits apart: codes of two chunks (K) or of two tokens (V). Unused high
 * bits of a code are zero. The including file defines
 *
 *   NAME, LANES, vi, vi_load vi_set vi_and vi_or vi_shift_right_each vi_shift_left_each
 *   vi_store_aligned(p, v), add_pairs(sum, a, b)
 *   vi_store_some(p, v, n)               the first n lanes, or all
 *   CHUNK_ROWS, CHUNK_VECTORS            sums of a block
 *   vi_load_repeated(p, words)           `words` words, repeated: 4 or 8, fewer than LANES
 *                                        if possible
 *   vi_shift_right_words(v, n)           of each 16 bits
 *   vi_multiply_words(a, b)              low halves of products of 16 bits
 *   vi_scale_words(a, b)                 a b / 2^15, rounded
 *   vi_double_words(v, odd)              the even (odd) 16 bits of each lane, in both halves
 *   vi_spread_quads(v, j)                lane LANES / 4 j + l in all four lanes of the l-th 128-bit
 *                                        piece
 *   length_table, load_lengths(p), look_up_lengths(table, v)
 *   fetch_rows(entries, index, odd, rows)
 *                                        entries of the even (odd) codes of LANES words: lane i of
 *                                        rows[j] has numbers 2 j and 2 j + 1 of word i
 *   vi_low_dwords vi_high_dwords vi_low_qwords vi_high_qwords
 *                                        two vectors interleaved within 128-bit pieces
 *   fetch_quads(entries, index, quads)   entries of both codes side by side: lane 4 i + j of
 *                                        quads[k] has number j of both codes of word 4 i + k
 *   octahedral_table, load_octahedral(p), CAN_COMPUTE, compute_triplets(table, bits, codes, x)
 *                                        entries, where CAN_COMPUTE
 *   fetch_pairs(entries, index, first, pairs)
 *                                        entries of both codes of words 4 first ... side by side:
 *                                        lane 4 i + j of pairs[k] has number j of both codes of
 *                                        word first + LANES / 4 k + i; 2 pairs */
#include "chunk_tiles.h"

#define PIECE_CHUNKS 16u

typedef struct number_tile {
    _Alignas(64) int32_t at[2 * PIECE_CHUNKS][KVANT_PAGE_TOKENS];
} number_tile;

/* The data that all codes of a page share. `bits` and `linear` (lengths are multiples of a step)
 * are passed as constants where this speeds up the loops; bits is 0 otherwise. */
typedef struct chunk_reader {
    const kvant_chunk_values *numbers;
    const kvant_chunk_layout *layout;
    const uint32_t *words;
    length_table lengths;
    octahedral_table octahedral;
} chunk_reader;

typedef struct plane_shifts {
    vi at[KVANT_MAX_CHUNK_PLANES];
} plane_shifts;

/* The shifts of LANES lanes for fields of p bits that lie side by side in `words` words: the field
 * moves on after each `words` lanes. */
KVANT_INLINE vi shifts_from(uint32_t p, uint32_t first, uint32_t words)
{
    uint32_t shifts[LANES];
    for (uint32_t j = 0; j < LANES; j++)
        shifts[j] = first + p * (j / words);
    return vi_load(shifts);
}

KVANT_INLINE plane_shifts key_shifts(uint32_t bits, uint32_t position)
{
    plane_shifts shifts;
    uint32_t i = 0;
    unrolled_for (uint32_t p = 16; p; p /= 2)
        if (bits & p)
            shifts.at[i++] = 4 * p >= LANES ? vi_set((int)(p * (position / (4 * p))))
                                            : shifts_from(p, p * (position / (4 * p)), 4 * p);
    return shifts;
}

KVANT_INLINE plane_shifts value_shifts(uint32_t bits, uint32_t k)
{
    plane_shifts shifts;
    uint32_t i = 0;
    unrolled_for (uint32_t p = 16; p; p /= 2)
        if (bits & p)
            shifts.at[i++] = vi_set((int)(p * (k % (16 / p))));
    return shifts;
}

KVANT_INLINE vi plane_codes(vi w, vi shift, uint32_t p, uint32_t to)
{
    if (p == 16)
        return w;
    w = vi_and(vi_shift_right_each(w, shift), vi_set((int)(((1u << p) - 1) * 0x10001u)));
    return to ? vi_shift_left_each(w, vi_set((int)to)) : w;
}

/* The codes of chunks 2 pair and 2 pair + 1 at LANES positions. */
KVANT_INLINE vi key_words(const chunk_reader *reader, uint32_t bits, const plane_shifts *shifts,
                          uint32_t pair, uint32_t position)
{
    vi codes = vi_set(0);
    uint32_t i = 0, to = 0;
    unrolled_for (uint32_t p = 16; p; p /= 2)
        if (bits & p) {
            const uint32_t *first =
                reader->words + reader->layout->planes[i].word_offset + (size_t)4 * p * pair;
            vi w = 4 * p >= LANES ? vi_load(first + position % (4 * p))
                                  : vi_load_repeated(first, 4 * p);
            codes = vi_or(codes, plane_codes(w, shifts->at[i++], p, to));
            to += p;
        }
    return codes;
}

/* The codes of both tokens of pair k for LANES chunks; codes beyond the last chunk are
 * undefined. */
KVANT_INLINE vi value_words(const chunk_reader *reader, uint32_t bits, const plane_shifts *shifts,
                            uint32_t k, uint32_t chunk)
{
    vi codes = vi_set(0);
    uint32_t i = 0, to = 0;
    unrolled_for (uint32_t p = 16; p; p /= 2)
        if (bits & p) {
            vi w = vi_load(reader->words + reader->layout->planes[i].word_offset +
                           (size_t)(k / (16 / p)) * reader->layout->n_chunks + chunk);
            codes = vi_or(codes, plane_codes(w, shifts->at[i++], p, to));
            to += p;
        }
    return codes;
}

KVANT_INLINE vi code_lengths(const chunk_reader *reader, bool linear, vi codes)
{
    vi above = vi_shift_right_words(codes, reader->numbers->index_bits);
    return linear ? vi_multiply_words(above, vi_set(reader->numbers->step * 0x10001))
                  : look_up_lengths(reader->lengths, above);
}

KVANT_INLINE vi code_indices(const chunk_reader *reader, vi codes)
{
    return vi_and(codes, vi_set((int)(((1u << reader->numbers->index_bits) - 1) * 0x10001u)));
}

/* x[j] becomes number j of both codes of each word. */
KVANT_INLINE void read_triplets(const chunk_reader *reader, bool computed, bool linear, vi codes,
                                vi x[3])
{
    vi lengths = code_lengths(reader, linear, codes);
    if (computed) {
        compute_triplets(&reader->octahedral, reader->numbers->index_bits / 2, codes, x);
    } else {
        vi quads[4];
        fetch_quads(reader->numbers->entries, code_indices(reader, codes), quads);
        vi a = vi_low_dwords(quads[0], quads[1]), b = vi_low_dwords(quads[2], quads[3]);
        x[0] = vi_low_qwords(a, b);
        x[1] = vi_high_qwords(a, b);
        x[2] =
            vi_low_qwords(vi_high_dwords(quads[0], quads[1]), vi_high_dwords(quads[2], quads[3]));
    }
    for (uint32_t j = 0; j < 3; j++)
        x[j] = vi_scale_words(x[j], lengths);
}

/* Writes rows 3 (c / 2) + j of the tile: numbers j of chunks first + c and first + c + 1, for even
 * c. */
KVANT_INLINE void triplet_key_tile(const chunk_reader *reader, uint32_t bits, bool computed,
                                   bool linear, uint32_t first, uint32_t n, number_tile *tile)
{
    for (uint32_t position = 0; position < KVANT_PAGE_TOKENS; position += LANES) {
        const plane_shifts shifts = key_shifts(bits, position);
        for (uint32_t c = 0; c < n; c += 2) {
            vi x[3];
            read_triplets(reader, computed, linear,
                          key_words(reader, bits, &shifts, (first + c) / 2, position), x);
            for (uint32_t j = 0; j < 3; j++)
                vi_store_aligned(tile->at[3 * (c / 2) + j] + position, x[j]);
        }
    }
}

/* Writes rows 2 c and 2 c + 1 of the tile. Row 2 c holds the first two numbers of chunk first + c,
 * row 2 c + 1 its last two numbers. */
KVANT_INLINE void key_tile(const chunk_reader *reader, uint32_t bits, bool linear, uint32_t first,
                           uint32_t n, number_tile *tile)
{
    for (uint32_t position = 0; position < KVANT_PAGE_TOKENS; position += LANES) {
        const plane_shifts shifts = key_shifts(bits, position);
        for (uint32_t c = 0; c < n; c += 2) {
            vi codes = key_words(reader, bits, &shifts, (first + c) / 2, position);
            vi lengths = code_lengths(reader, linear, codes), index = code_indices(reader, codes);
            unrolled_for (uint32_t odd = 0; odd < 2; odd++) {
                vi rows[2], length = vi_double_words(lengths, odd);
                fetch_rows(reader->numbers->entries, index, odd, rows);
                vi_store_aligned(tile->at[2 * (c + odd)] + position,
                                 vi_scale_words(rows[0], length));
                vi_store_aligned(tile->at[2 * (c + odd) + 1] + position,
                                 vi_scale_words(rows[1], length));
            }
        }
    }
}

/* The index in vi_pair_words(x) of the pair of tokens k of a page's words. */
KVANT_INLINE uint32_t pair_place(uint32_t k)
{
    return 16 * (k / 4 % 2) + 4 * (k / 8) + k % 4;
}

/* Stores the numbers of LANES / 2 chunks. */
KVANT_INLINE void store_pairs(const chunk_reader *reader, vi lengths, vi index, uint32_t half,
                              int32_t *out)
{
    vi pairs[2];
    fetch_pairs(reader->numbers->entries, index, half, pairs);
    vi_store_aligned(out, vi_scale_words(pairs[0], vi_spread_quads(lengths, 2 * half)));
    vi_store_aligned(out + LANES, vi_scale_words(pairs[1], vi_spread_quads(lengths, 2 * half + 1)));
}

/* Writes row pair_place(k): the numbers of chunk first + c begin at 4 c. */
KVANT_INLINE void value_tile(const chunk_reader *reader, uint32_t bits, bool linear, uint32_t first,
                             uint32_t n, number_tile *tile)
{
    for (uint32_t k = 0; k < KVANT_PAGE_TOKENS / 2; k++) {
        const plane_shifts shifts = value_shifts(bits, k);
        int32_t *row = tile->at[pair_place(k)];
        for (uint32_t c = 0; c < n; c += LANES) {
            vi codes = value_words(reader, bits, &shifts, k, first + c);
            vi lengths = code_lengths(reader, linear, codes), index = code_indices(reader, codes);
            store_pairs(reader, lengths, index, 0, row + 4 * c);
            if (c + LANES / 2 < n)
                store_pairs(reader, lengths, index, 1, row + 4 * c + 2 * LANES);
        }
    }
}

/* The lanes that number j of a piece's triplets takes. */
KVANT_INLINE uint32_t triplet_lanes(uint32_t n)
{
    return (n + LANES - 1) / LANES * LANES;
}

/* Writes row pair_place(k): number j of chunk first + c is in lane c of the lanes of j. */
KVANT_INLINE void triplet_value_tile(const chunk_reader *reader, uint32_t bits, bool computed,
                                     bool linear, uint32_t first, uint32_t n, number_tile *tile)
{
    for (uint32_t k = 0; k < KVANT_PAGE_TOKENS / 2; k++) {
        const plane_shifts shifts = value_shifts(bits, k);
        for (uint32_t c = 0; c < n; c += LANES) {
            vi x[3];
            read_triplets(reader, computed, linear,
                          value_words(reader, bits, &shifts, k, first + c), x);
            for (uint32_t j = 0; j < 3; j++)
                vi_store_aligned(tile->at[pair_place(k)] + triplet_lanes(n) * j + c, x[j]);
        }
    }
}

KVANT_INLINE int32_t pair_at(const int16_t *x)
{
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return pair;
}

/* Sums of several vectors of the tile's columns over its first n_pairs rows. more: dots already has
 * the sums of earlier pieces. */
KVANT_INLINE void multiply_block(const number_tile *tile, uint32_t column, uint32_t vectors,
                                 uint32_t n_pairs, const int16_t *x, size_t x_stride, uint32_t rows,
                                 bool more, int32_t *dots, size_t dots_stride)
{
    vi sum[CHUNK_ROWS][CHUNK_VECTORS];
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t j = 0; j < vectors; j++)
            sum[i][j] = more ? vi_load(dots + i * dots_stride + column + LANES * j) : vi_set(0);
    for (uint32_t pair = 0; pair < n_pairs; pair++) {
        vi numbers[CHUNK_VECTORS];
        unrolled_for (uint32_t j = 0; j < vectors; j++)
            numbers[j] = vi_load(tile->at[pair] + column + LANES * j);
        unrolled_for (uint32_t i = 0; i < rows; i++) {
            vi factor = vi_set(pair_at(x + i * x_stride + 2 * pair));
            unrolled_for (uint32_t j = 0; j < vectors; j++)
                sum[i][j] = add_pairs(sum[i][j], numbers[j], factor);
        }
    }
    unrolled_for (uint32_t i = 0; i < rows; i++)
        unrolled_for (uint32_t j = 0; j < vectors; j++)
            vi_store_aligned(dots + i * dots_stride + column + LANES * j, sum[i][j]);
}

KVANT_INLINE void multiply_rows(const number_tile *tile, uint32_t columns, uint32_t n_pairs,
                                const int16_t *x, size_t x_stride, uint32_t rows, bool more,
                                int32_t *dots, size_t dots_stride)
{
    uint32_t column = 0;
    columns = (columns + LANES - 1) / LANES * LANES;
    for (; column + LANES * CHUNK_VECTORS <= columns; column += LANES * CHUNK_VECTORS)
        multiply_block(tile, column, CHUNK_VECTORS, n_pairs, x, x_stride, rows, more, dots,
                       dots_stride);
    if (CHUNK_VECTORS > 3 && columns - column == 3 * LANES) {
        multiply_block(tile, column, 3, n_pairs, x, x_stride, rows, more, dots, dots_stride);
        return;
    }
    for (; column + 2 * LANES <= columns; column += 2 * LANES)
        multiply_block(tile, column, 2, n_pairs, x, x_stride, rows, more, dots, dots_stride);
    if (column < columns)
        multiply_block(tile, column, 1, n_pairs, x, x_stride, rows, more, dots, dots_stride);
}

/* n is at most CHUNK_ROWS. */
static void multiply(const number_tile *tile, uint32_t columns, uint32_t n_pairs, const int16_t *x,
                     size_t x_stride, uint32_t n, bool more, int32_t *dots, size_t dots_stride){
#define MULTIPLY(rows)                                                                             \
    multiply_rows(tile, columns, n_pairs, x, x_stride, rows, more, dots, dots_stride)
    KVANT_CALL_CONSTANT(n, 6, MULTIPLY)
}

KVANT_INLINE uint32_t at_most(uint32_t n, uint32_t most)
{
    return n < most ? n : most;
}

KVANT_INLINE void key_piece(const chunk_reader *reader, const number_tile *tile, uint32_t first,
                            uint32_t chunks, const int16_t *x, size_t x_stride, int32_t *dots,
                            size_t dots_stride, uint32_t n)
{
    const uint32_t size = reader->numbers->components,
                   numbers = size * (chunks + (size == 3 && chunks % 2));
    for (uint32_t i = 0; i < n; i += CHUNK_ROWS)
        multiply(tile, KVANT_PAGE_TOKENS, numbers / 2, x + i * x_stride + size * first, x_stride,
                 at_most(n - i, CHUNK_ROWS), first > 0, dots + i * dots_stride, dots_stride);
}

KVANT_INLINE void copy_sums(int32_t *dots, const int32_t *sums, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += LANES)
        vi_store_some(dots + i, vi_load(sums + i), n - i);
}

/* Puts the sums of a piece of chunks into dots. */
KVANT_INLINE void place_sums(const kvant_chunk_values *numbers, uint32_t first, uint32_t chunks,
                             const int32_t *sums, int32_t *dots)
{
    const kvant_triplet_positions places = kvant_triplet_positions_of(numbers->dim);
    if (numbers->components == 4)
        copy_sums(dots + 4 * first, sums,
                  at_most(4 * chunks, kvant_padded_dim(numbers->dim) - 4 * first));
    for (uint32_t j = 0; j < 3 && numbers->components == 3; j++)
        if (first < places.n[j])
            copy_sums(dots + places.first[j] + first, sums + triplet_lanes(chunks) * j,
                      at_most(chunks, places.n[j] - first));
}

KVANT_INLINE void value_piece(const chunk_reader *reader, const number_tile *tile, uint32_t first,
                              uint32_t chunks, const int16_t *x, size_t x_stride, int32_t *dots,
                              size_t dots_stride, uint32_t n)
{
    _Alignas(64) int16_t pairs[CHUNK_ROWS][KVANT_PAGE_TOKENS];
    _Alignas(64) int32_t sums[CHUNK_ROWS][KVANT_PAGE_TOKENS];
    const uint32_t columns =
        reader->numbers->components == 3 ? 3 * triplet_lanes(chunks) : 4 * chunks;
    for (uint32_t i = 0; i < n; i += CHUNK_ROWS) {
        const uint32_t rows = at_most(n - i, CHUNK_ROWS);
        for (uint32_t r = 0; r < rows; r++)
            for (uint32_t j = 0; j < KVANT_PAGE_TOKENS; j += 2 * LANES)
                vi_store_aligned(pairs[r] + j, vi_pair_words(vi_load(x + (i + r) * x_stride + j)));
        multiply(tile, columns, KVANT_PAGE_TOKENS / 2, pairs[0], KVANT_PAGE_TOKENS, rows, false,
                 sums[0], KVANT_PAGE_TOKENS);
        for (uint32_t r = 0; r < rows; r++)
            place_sums(reader->numbers, first, chunks, sums[r], dots + (i + r) * dots_stride);
    }
}

/* Clears the dots of padding behind the channels of a value of triplets. */
KVANT_INLINE void clear_padding(const kvant_chunk_values *numbers, int32_t *dots,
                                size_t dots_stride, uint32_t n)
{
    const uint32_t dim = numbers->dim, padded = kvant_padded_dim(dim);
    for (uint32_t i = 0; i < n && padded > dim; i++)
        memset(dots + i * dots_stride + dim, 0, (padded - dim) * sizeof *dots);
}

/* How codes become numbers. The members are constants where this speeds up the loops. */
typedef struct chunk_kind {
    uint32_t bits;
    bool triplets, computed, linear;
} chunk_kind;

KVANT_INLINE void make_tile_of(const chunk_reader *reader, chunk_kind kind, uint32_t first,
                               uint32_t chunks, number_tile *tile)
{
    const bool key = reader->layout->role == KVANT_ROLE_K;
    if (kind.triplets && key)
        triplet_key_tile(reader, kind.bits, kind.computed, kind.linear, first, chunks, tile);
    else if (kind.triplets)
        triplet_value_tile(reader, kind.bits, kind.computed, kind.linear, first, chunks, tile);
    else if (key)
        key_tile(reader, kind.bits, kind.linear, first, chunks, tile);
    else
        value_tile(reader, kind.bits, kind.linear, first, chunks, tile);
}

KVANT_INLINE void chunk_dots_of(const chunk_reader *reader, chunk_kind kind, const int16_t *x,
                                size_t x_stride, int32_t *dots, size_t dots_stride, uint32_t n)
{
    number_tile tile;
    for (uint32_t first = 0; first < reader->layout->n_chunks; first += PIECE_CHUNKS) {
        const uint32_t chunks = at_most(reader->layout->n_chunks - first, PIECE_CHUNKS);
        make_tile_of(reader, kind, first, chunks, &tile);
        if (reader->layout->role == KVANT_ROLE_K)
            key_piece(reader, &tile, first, chunks, x, x_stride, dots, dots_stride, n);
        else
            value_piece(reader, &tile, first, chunks, x, x_stride, dots, dots_stride, n);
    }
    if (reader->layout->role == KVANT_ROLE_V)
        clear_padding(reader->numbers, dots, dots_stride, n);
}

/* The usual formats are compiled separately: octopus-2 to -4 and hqmq-s96r4. */
static KVANT_CHUNK_DOTS_FN(NAME(chunk_dots))
{
    const bool triplets = numbers->components == 3, linear = numbers->step != 0;
    const bool computed = CAN_COMPUTE && triplets && numbers->octahedral;
    chunk_reader reader = { .numbers = numbers,
                            .layout = layout,
                            .words = page,
                            .lengths = load_lengths(numbers->lengths) };
    if (computed)
        reader.octahedral = load_octahedral(numbers->octahedral);
    const bool usual = triplets && !linear && computed == CAN_COMPUTE;
    if (usual && layout->bits == 13)
        chunk_dots_of(&reader, (chunk_kind){ 13, true, CAN_COMPUTE, false }, x, x_stride, dots,
                      dots_stride, n);
    else if (usual && layout->bits == 10)
        chunk_dots_of(&reader, (chunk_kind){ 10, true, CAN_COMPUTE, false }, x, x_stride, dots,
                      dots_stride, n);
    else if (usual && layout->bits == 7)
        chunk_dots_of(&reader, (chunk_kind){ 7, true, CAN_COMPUTE, false }, x, x_stride, dots,
                      dots_stride, n);
    else if (!triplets && linear && layout->bits == 16)
        chunk_dots_of(&reader, (chunk_kind){ 16, false, false, true }, x, x_stride, dots,
                      dots_stride, n);
    else
        chunk_dots_of(&reader, (chunk_kind){ layout->bits, triplets, computed, linear }, x,
                      x_stride, dots, dots_stride, n);
}
