/* chunk_tiles_template.h - pages of chunk codes as tiles, for any vector width. Included before
 * simd_template.h.
 *
 * A vector holds neighbouring token positions of one chunk (K) or neighbouring chunks of one token
 * (V). The including file also defines
 *
 *   vf_and(a, b) vf_or(a, b) vf_min(a, b) vf_fnma(a, b, c)=c-ab
 *   vf_rsqrt(x)             1 / sqrt(x) to a relative error of 1.5 x 2^-12
 *   vf_store_first(p, x, n) the first n < LANES numbers
 *   vi_shift_right_each(v, n)
 *   vf_absolute(x) vf_xor(a, b)
 *   vi_load_repeated(p, words)      `words` words, repeated: 4 or 8
 *   vi_shift_left_by(v, n), vi_any_equal(a, b)
 *   vf_load_quads(p, index, step)   4 floats at p + 4 index[step l] in the l-th 128-bit piece
 *   vf_spread_quads(x, j)           number LANES / 4 j + l of x in all of the l-th piece
 *   vf_unpack_low vf_unpack_high vf_low_halves vf_high_halves
 *                                   of two vectors, within 128-bit pieces */
#include "chunk_tiles.h"

/* The shift of each lane within a block of LANES positions. A plane whose 4 p words are fewer than
 * LANES moves on by p bits after every 4 p lanes. */
KVANT_INLINE vi lane_shifts(uint32_t p, uint32_t first)
{
    uint32_t shifts[LANES];
    for (uint32_t j = 0; j < LANES; j++)
        shifts[j] = first + p * (j / (4 * p));
    return vi_load(shifts);
}

/* The bits of a plane of chunks 2 pair and 2 pair + 1. Chunk 2 pair is in the lower half of each
 * lane, from bit 0 on; the second chunk is in the upper half, from bit 16 on. */
KVANT_INLINE vi key_plane(const kvant_chunk_plane *plane, const uint32_t *words, uint32_t pair,
                          uint32_t position)
{
    const uint32_t p = plane->bits, *first = words + plane->word_offset + (size_t)4 * p * pair;
    if (4 * p >= LANES)
        return vi_shift_right_by(vi_load(first + position % (4 * p)), p * (position / (4 * p)));
    return vi_shift_right_each(vi_load_repeated(first, 4 * p),
                               lane_shifts(p, p * (position / (4 * p))));
}

KVANT_INLINE vi key_codes(const kvant_chunk_layout *layout, const uint32_t *words, uint32_t chunk,
                          uint32_t position)
{
    vi codes = vi_set(0);
    for (uint32_t i = 0; i < layout->n_planes; i++) {
        const kvant_chunk_plane *plane = &layout->planes[i];
        vi w = vi_shift_right_by(key_plane(plane, words, chunk / 2, position), 16 * (chunk % 2));
        codes =
            vi_or(codes, vi_shift_left_by(vi_and(w, vi_set((1 << plane->bits) - 1)), plane->shift));
    }
    return codes;
}

/* The codes of a token's chunks. The page continues with other codes or metadata behind the last
 * chunk, so lanes beyond it have any bits. */
KVANT_INLINE vi value_codes(const kvant_chunk_layout *layout, const uint32_t *words, uint32_t token,
                            uint32_t chunk)
{
    vi codes = vi_set(0);
    const uint32_t k = 8 * (token % 8 / 2) + 4 * (token % 16 / 8) + token / 16;
    for (uint32_t i = 0; i < layout->n_planes; i++) {
        const kvant_chunk_plane *plane = &layout->planes[i];
        const uint32_t p = plane->bits, fields = 16 / p;
        vi w =
            vi_load(words + plane->word_offset + (size_t)(k / fields) * layout->n_chunks + chunk);
        w = vi_shift_right_by(w, p * (k % fields) + 16 * (token % 2));
        codes = vi_or(codes, vi_shift_left_by(vi_and(w, vi_set((1 << p) - 1)), plane->shift));
    }
    return codes;
}

typedef struct triplet_tables {
    const kvant_triplet_book *book;
    value_table direction, norm;
} triplet_tables;

typedef struct triplet_vectors {
    vf at[3];
} triplet_vectors;

/* A step of Newton's method: a relative error d becomes 1.5 d^2 plus two roundings. */
KVANT_INLINE vf inverse_square_root(vf x)
{
    vf r = vf_rsqrt(x);
    return vf_fma(r, vf_fnma(vf_mul(vf_mul(vf_set(0.5f), x), r), r, vf_set(0.5f)), r);
}

/* entries: constants of at least the number of levels. */
KVANT_INLINE triplet_vectors decode_triplets(const triplet_tables *tables, uint32_t directions,
                                             uint32_t norms, vi codes, vf scale)
{
    const kvant_triplet_book *book = tables->book;
    const uint32_t bits = book->direction_bits;
    const vi mask = vi_set((1 << bits) - 1);
    const vf sign = vf_set(-0.0f);
    vf u = table_look_up(&tables->direction, book->direction, vi_and(codes, mask), directions);
    vf w = table_look_up(&tables->direction, book->direction,
                         vi_and(vi_shift_right_by(codes, bits), mask), directions);
    vi level = vi_and(vi_shift_right_by(codes, 2 * bits), vi_set((1 << book->norm_bits) - 1));
    vf norm = table_look_up(&tables->norm, book->norm, level, norms);
    vf z = vf_sub(vf_sub(vf_set(1), vf_absolute(u)), vf_absolute(w)), fold = vf_min(z, vf_zero());
    /* Subtracts copysign(t, u) from u: fold is -t, and its sign is changed where u is negative. */
    vf x = vf_add(u, vf_xor(fold, vf_and(u, sign))), y = vf_add(w, vf_xor(fold, vf_and(w, sign)));
    vf den = vf_fma(z, z, vf_fma(y, y, vf_mul(x, x)));
    vf factor = vf_mul(vf_mul(scale, norm), inverse_square_root(den));
    return (triplet_vectors){ { vf_mul(factor, x), vf_mul(factor, y), vf_mul(factor, z) } };
}

KVANT_INLINE void unpack_triplet_keys(const triplet_tables *tables, uint32_t directions,
                                      uint32_t norms, const kvant_chunk_layout *layout,
                                      const uint32_t *words, const float *scale, uint32_t dim,
                                      float *tile)
{
    kvant_clear_padding(dim, tile);
    for (uint32_t c = 0; c < layout->n_chunks; c++)
        for (uint32_t position = 0; position < KVANT_PAGE_TOKENS; position += LANES) {
            triplet_vectors x =
                decode_triplets(tables, directions, norms, key_codes(layout, words, c, position),
                                vf_load(scale + position));
            for (uint32_t j = 0; j < 3 && 3 * c + j < dim; j++)
                vf_store(tile + (size_t)(3 * c + j) * KVANT_PAGE_TOKENS + position, x.at[j]);
        }
}

KVANT_INLINE void store_some(float *p, vf x, uint32_t n)
{
    if (n >= LANES)
        vf_store_unaligned(p, x);
    else
        vf_store_first(p, x, n);
}

KVANT_INLINE void unpack_triplet_values(const triplet_tables *tables, uint32_t directions,
                                        uint32_t norms, const kvant_chunk_layout *layout,
                                        const uint32_t *words, const float *scale, uint32_t dim,
                                        float *tile)
{
    const kvant_triplet_positions places = kvant_triplet_positions_of(dim);
    for (uint32_t token = 0; token < KVANT_PAGE_TOKENS; token++) {
        const uint32_t position = kvant_token_position(token);
        float *row = tile + (size_t)position * kvant_padded_dim(dim);
        for (uint32_t c = 0; c < layout->n_chunks; c += LANES) {
            triplet_vectors x =
                decode_triplets(tables, directions, norms, value_codes(layout, words, token, c),
                                vf_set(scale[position]));
            for (uint32_t j = 0; j < 3; j++)
                if (c < places.n[j])
                    store_some(row + places.first[j] + c, x.at[j], places.n[j] - c);
        }
    }
}

KVANT_INLINE void unpack_triplets_of(const kvant_triplet_book *book, uint32_t directions,
                                     uint32_t norms, const kvant_chunk_layout *layout,
                                     const uint32_t *words, const float *scale, uint32_t dim,
                                     float *tile)
{
    const triplet_tables tables = { book, table_load(book->direction, directions),
                                    table_load(book->norm, norms) };
    if (layout->role == KVANT_ROLE_K)
        unpack_triplet_keys(&tables, directions, norms, layout, words, scale, dim, tile);
    else
        unpack_triplet_values(&tables, directions, norms, layout, words, scale, dim, tile);
}

static KVANT_UNPACK_TRIPLETS_FN(NAME(unpack_triplets))
{
    if (book->direction_bits <= 4 && book->norm_bits <= 3)
        unpack_triplets_of(book, 16, 8, layout, page, scale, dim, tile);
    else if (book->direction_bits <= 5 && book->norm_bits <= 4)
        unpack_triplets_of(book, 32, 16, layout, page, scale, dim, tile);
    else
        unpack_triplets_of(book, 256, 128, layout, page, scale, dim, tile);
}

/* The codes of a vector's chunks, split: indices of directions, stored to memory for the loads that
 * follow, and radii times scales. */
typedef struct direction_lanes {
    _Alignas(64) uint32_t index[LANES];
    _Alignas(64) uint32_t above[LANES];
    vf radius;
    bool outliers;
} direction_lanes;

KVANT_INLINE direction_lanes split_codes(const kvant_direction_book *book, vi codes, vf scale)
{
    direction_lanes lanes;
    vi index = vi_and(codes, vi_set((1 << book->index_bits) - 1)),
       above = vi_shift_right_by(codes, book->index_bits);
    vi_store(lanes.index, index);
    lanes.radius = vf_mul(scale, vf_from_codes(above));
    lanes.outliers = book->slots && vi_any_equal(index, vi_set((int32_t)book->n_codewords));
    if (lanes.outliers)
        vi_store(lanes.above, above);
    return lanes;
}

/* Transposes four vectors of codewords, one in each 128-bit piece, to vectors of their
 * components. */
KVANT_INLINE void transpose_quads(vf x[4])
{
    vf a = vf_unpack_low(x[0], x[1]), b = vf_unpack_low(x[2], x[3]);
    vf c = vf_unpack_high(x[0], x[1]), d = vf_unpack_high(x[2], x[3]);
    x[0] = vf_low_halves(a, b);
    x[1] = vf_high_halves(a, b);
    x[2] = vf_low_halves(c, d);
    x[3] = vf_high_halves(c, d);
}

static void place_key_outliers(const kvant_direction_book *book, const direction_lanes *lanes,
                               const uint16_t *outliers, uint32_t position, uint32_t n, float *out)
{
    for (uint32_t j = 0; j < LANES; j++) {
        const uint32_t at = position + j, token = at % 4 * 16 + at / 32 * 8 + at % 32 / 4;
        if (lanes->index[j] == book->n_codewords && lanes->above[j] < book->slots)
            kvant_place_outlier(outliers, lanes->above[j], token, n, KVANT_PAGE_TOKENS, out + j);
    }
}

KVANT_INLINE void unpack_direction_keys(const kvant_direction_book *book,
                                        const kvant_chunk_layout *layout, const uint32_t *words,
                                        const float *scale, const uint16_t *outliers, uint32_t dim,
                                        float *tile)
{
    kvant_clear_padding(dim, tile);
    for (uint32_t c = 0; c < layout->n_chunks; c++) {
        const uint32_t n = dim - 4 * c < 4 ? dim - 4 * c : 4;
        for (uint32_t position = 0; position < KVANT_PAGE_TOKENS; position += LANES) {
            float *out = tile + (size_t)4 * c * KVANT_PAGE_TOKENS + position;
            direction_lanes lanes =
                split_codes(book, key_codes(layout, words, c, position), vf_load(scale + position));
            vf x[4];
            for (uint32_t j = 0; j < 4; j++)
                x[j] = vf_load_quads(book->codewords, lanes.index + j, 4);
            transpose_quads(x);
            for (uint32_t j = 0; j < n; j++)
                vf_store(out + j * KVANT_PAGE_TOKENS, vf_mul(lanes.radius, x[j]));
            if (KVANT_UNLIKELY(lanes.outliers))
                place_key_outliers(book, &lanes, outliers, position, n, out);
        }
    }
}

static void place_value_outliers(const kvant_direction_book *book, const direction_lanes *lanes,
                                 const uint16_t *outliers, uint32_t token, uint32_t n_chunks,
                                 float *out)
{
    for (uint32_t j = 0; j < LANES && j < n_chunks; j++)
        if (lanes->index[j] == book->n_codewords && lanes->above[j] < book->slots)
            kvant_place_outlier(outliers, lanes->above[j], token, 4, 1, out + 4 * j);
}

/* Rows are padded to 16 numbers, which is 4 chunks. Chunks beyond the last become arbitrary finite
 * numbers, because every index and every radius gives finite numbers. */
KVANT_INLINE void unpack_direction_values(const kvant_direction_book *book,
                                          const kvant_chunk_layout *layout, const uint32_t *words,
                                          const float *scale, const uint16_t *outliers,
                                          uint32_t dim, float *tile)
{
    const uint32_t padded = kvant_padded_dim(dim);
    for (uint32_t token = 0; token < KVANT_PAGE_TOKENS; token++) {
        const uint32_t position = kvant_token_position(token);
        for (uint32_t c = 0; c < layout->n_chunks; c += LANES) {
            float *out = tile + (size_t)position * padded + 4 * c;
            direction_lanes lanes =
                split_codes(book, value_codes(layout, words, token, c), vf_set(scale[position]));
            for (uint32_t j = 0; j < 4 && 4 * c + LANES * j < padded; j++)
                vf_store(out + LANES * j,
                         vf_mul(vf_spread_quads(lanes.radius, j),
                                vf_load_quads(book->codewords, lanes.index + LANES / 4 * j, 1)));
            if (KVANT_UNLIKELY(lanes.outliers))
                place_value_outliers(book, &lanes, outliers, token, layout->n_chunks - c, out);
        }
    }
}

static KVANT_UNPACK_DIRECTIONS_FN(NAME(unpack_directions))
{
    if (layout->role == KVANT_ROLE_K)
        unpack_direction_keys(book, layout, page, scale, outliers, dim, tile);
    else
        unpack_direction_values(book, layout, page, scale, outliers, dim, tile);
}
