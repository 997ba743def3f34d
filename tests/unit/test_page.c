/* test_page.c - the plane of codes: positions against format.md, and unpacking at every CPU level
 * against decoding. */
#include "testing.h"

#include "../../src/codec/encode.h"
#include "../../src/page/chunks.h"

/* format.md, "Scalar codes", written down a second time with its own names. */
static uint32_t code_by_the_document(const uint32_t *plane, uint32_t p, uint32_t row_tiles,
                                     uint32_t column_tiles, uint32_t row, uint32_t column)
{
    uint32_t cw = 4 / p, cu = (column_tiles + cw - 1) / cw, rt = row / 16, r = row % 16,
             ct = column / 16;
    uint32_t c = column % 16, g = rt / 4, big_r = row_tiles - 4 * g < 4 ? row_tiles - 4 * g : 4;
    uint32_t lane = 4 * (r % 8) + (c % 8) / 2;
    uint32_t word = 128 * g * cu + (32 * (ct / cw) + lane) * big_r + rt % 4;
    uint32_t field = 4 * (ct % cw) + r / 8 + 2 * (c / 8);
    return plane[word] >> (p * field + 16 * (c % 2)) & ((1u << p) - 1);
}

static uint32_t plane_words(uint32_t p, uint32_t row_tiles, uint32_t column_tiles)
{
    uint32_t cw = 4 / p;
    return 32 * ((column_tiles + cw - 1) / cw) * row_tiles;
}

CASE(codes_lie_where_the_document_says)
{
    static const uint32_t dims[] = { 1, 16, 40, 64, 80, 96, 112, 128, 256 };
    static const uint32_t planes[9][3] = { { 0 },    { 1 },    { 2 },       { 2, 1 }, { 4 },
                                           { 4, 1 }, { 4, 2 }, { 4, 2, 1 }, { 4, 4 } };
    uint64_t rng = 4;
    for (size_t d = 0; d < COUNT(dims); d++)
        for (uint32_t bits = 1; bits <= 8; bits++)
            for (int role = 0; role < 2; role++) {
                kvant_layout layout;
                kvant_layout_init(&layout, (kvant_role)role, dims[d], bits);
                uint32_t *page = aligned(layout.code_bytes);
                static uint8_t codes[64][512], back[512];
                for (uint32_t t = 0; t < 64; t++) {
                    for (uint32_t j = 0; j < dims[d]; j++)
                        codes[t][j] = (uint8_t)(test_random(&rng) & ((1u << bits) - 1));
                    kvant_layout_put(&layout, page, t, codes[t]);
                }
                uint32_t row_tiles = role ? (dims[d] + 15) / 16 : 4,
                         column_tiles = role ? 4 : (dims[d] + 15) / 16;
                size_t words = 0;
                for (uint32_t i = 0; i < 3 && planes[bits][i]; i++)
                    words += plane_words(planes[bits][i], row_tiles, column_tiles);
                assert_int_equal(layout.code_bytes, 4 * words);
                for (uint32_t t = 0; t < 64; t++) {
                    kvant_layout_get(&layout, page, t, back);
                    assert_memory_equal(codes[t], back, dims[d]);
                    for (uint32_t j = 0; j < dims[d]; j++) {
                        const uint32_t *plane = page;
                        uint32_t code = 0, shift = 0;
                        for (uint32_t i = 0; i < 3 && planes[bits][i]; i++) {
                            uint32_t p = planes[bits][i];
                            code |= code_by_the_document(plane, p, row_tiles, column_tiles,
                                                         role ? j : t, role ? t : j)
                                    << shift;
                            plane += plane_words(p, row_tiles, column_tiles);
                            shift += p;
                        }
                        assert_int_equal(code, codes[t][j]);
                    }
                }
                free(page);
            }
}

/* Compares a page that decode() reads with the unpacked page of every level. */
static void check_unpacking(const kvant_codec *codec, const char *spec, kvant_role role,
                            const void *page)
{
    const uint32_t dim = codec->info.head_dim, padded = codec->layout.padded_dim;
    float *tile = aligned((size_t)64 * padded * sizeof *tile),
          *rows = malloc((size_t)64 * KVANT_MAX_HEAD_DIM * sizeof *rows);
    for (uint32_t t = 0; t < 64; t++)
        kvant_codec_decode_transformed(codec, kvant_kernels_get(KVANT_CPU_AUTO), page, t,
                                       rows + t * KVANT_MAX_HEAD_DIM);
    for (size_t l = 0; l < COUNT(cpu_levels); l++) {
        if (!has_level(cpu_levels[l]))
            continue;
        memset(tile, 0xff, (size_t)64 * padded * sizeof *tile);
        codec->quantizer->unpack(codec, kvant_kernels_get(cpu_levels[l]), page, tile);
        for (uint32_t t = 0; t < 64; t++)
            for (uint32_t j = 0; j < padded; j++) {
                size_t at = role ? kvant_token_position(t) * padded +
                                       kvant_layout_row_position(&codec->layout, j)
                                 : j * 64 + kvant_token_position(t);
                float y = rows[t * KVANT_MAX_HEAD_DIM + j];
                if (j >= dim)
                    assert_true(role || tile[at] == 0);
                /* One product and one sum, fused or not, differ by an ulp of the larger term. */
                else if (!(fabsf(tile[at] - y) <= 2.4e-7f * (fabsf(y) + 8)))
                    fail_msg("%s %s dim %u token %u channel %u: %g, not %g",
                             kvant_cpu_level_name(cpu_levels[l]), spec, dim, t, j, tile[at], y);
            }
    }
    free(tile);
    free(rows);
}

CASE(unpacking_is_decoding_at_every_level)
{
    static const uint32_t dims[] = { 16, 40, 64, 80, 96, 112, 128, 256 };
    uint64_t rng = 11;
    for (size_t s = 0; s < COUNT(all_specs); s++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (int role = 0; role < 2; role++) {
                kvant_codec *codec;
                if (kvant_codec_create(all_specs[s], dims[d], (kvant_role)role, 1, &codec, NULL,
                                       0) != KVANT_OK)
                    continue;
                void *page = aligned(info_of(codec).page_bytes);
                float *x = malloc((size_t)64 * dims[d] * sizeof *x);
                fill_normal(x, (size_t)64 * dims[d], &rng);
                assert_ok(kvant_codec_encode(codec, NULL, x, dims[d], 0, 64, page));
                check_unpacking(codec, all_specs[s], (kvant_role)role, page);
                free(x);
                free(page);
                kvant_codec_free(&codec);
            }
}

/* Attention multiplies integers in place of chunk codes. An integer times step and the token's
 * scale must be the decoded number, within `error` steps. */
CASE(numbers_are_near_decoding)
{
    static const uint32_t dims[] = { 32, 64, 80, 96, 112, 128, 256 };
    uint64_t rng = 14;
    uint32_t offered = 0;
    for (size_t s = 0; s < COUNT(all_specs); s++)
        for (size_t d = 0; d < COUNT(dims); d++) {
            kvant_codec *codec;
            if (kvant_codec_create(all_specs[s], dims[d], KVANT_ROLE_K, 1, &codec, NULL, 0) !=
                KVANT_OK)
                continue;
            const kvant_code_values *numbers =
                codec->view.kind == KVANT_CODES_CHUNK ? codec->product.integers.chunk : NULL;
            void *page = aligned(info_of(codec).page_bytes);
            float *x = malloc((size_t)64 * dims[d] * sizeof *x), y[KVANT_MAX_HEAD_DIM];
            uint32_t codes[KVANT_MAX_HEAD_DIM];
            fill_normal(x, (size_t)64 * dims[d], &rng);
            assert_int_equal(kvant_codec_encode(codec, NULL, x, dims[d], 0, 64, page), KVANT_OK);
            offered += numbers != NULL;
            for (uint32_t t = 0; numbers && t < 64; t++) {
                const kvant_chunk_values *chunk = &numbers->chunk;
                const double scale = kvant_half_to_float(
                    ((const uint16_t *)((const uint8_t *)page + codec->info.metadata_offset))[t]);
                kvant_chunk_layout_get(numbers->layout, page, t, codes);
                kvant_codec_decode_transformed(codec, kvant_kernels_get(KVANT_CPU_AUTO), page, t,
                                               y);
                for (uint32_t j = 0; j < dims[d]; j++) {
                    const uint32_t code = codes[j / chunk->components],
                                   above = code >> chunk->index_bits;
                    const uint32_t index = code & ((1u << chunk->index_bits) - 1);
                    const int32_t length =
                        chunk->step ? chunk->step * (int32_t)above : chunk->lengths[above];
                    const int32_t number =
                        kvant_scale_word(chunk->entries[4 * index + j % chunk->components], length);
                    assert_true(abs(number) <= KVANT_CODE_VALUE_MAX);
                    if (!(fabs(number * scale * numbers->step - y[j]) <=
                          numbers->error * numbers->step * scale))
                        fail_msg("%s dim %u token %u channel %u: %g, not %g", all_specs[s], dims[d],
                                 t, j, number * scale * numbers->step, y[j]);
                }
            }
            free(x);
            free(page);
            kvant_codec_free(&codec);
        }
    if (KVANT_PAPERS) /* all chunk codes belong to papers' codecs */
        assert_true(offered >= 10 * COUNT(dims));
}

/* Positions are a permutation: no two rows share a position. */
CASE(positions_are_a_permutation)
{
    for (uint32_t dim = 1; dim <= 512; dim += 15) {
        kvant_layout layout;
        bool seen[512] = { false };
        kvant_layout_init(&layout, KVANT_ROLE_V, dim, 4);
        for (uint32_t i = 0; i < layout.padded_dim; i++) {
            uint32_t at = kvant_layout_row_position(&layout, i);
            assert_true(at < layout.padded_dim && !seen[at]);
            seen[at] = true;
        }
    }
    kvant_layout keys;
    kvant_layout_init(&keys, KVANT_ROLE_K, 64, 4);
    for (uint32_t t = 0; t < 64; t++)
        assert_int_equal(kvant_token_position(t), kvant_layout_row_position(&keys, t));
}

CASE(matmul_and_exp_agree_with_double)
{
    enum { M = 14, K = 67, N = 144 };
    uint64_t rng = 12;
    float *a = aligned(M * K * 4), *b = aligned(K * N * 4), *c = aligned(M * N * 4);
    for (size_t l = 0; l < COUNT(cpu_levels); l++) {
        if (!has_level(cpu_levels[l]))
            continue;
        const kvant_kernels *kernels = kvant_kernels_get(cpu_levels[l]);
        fill_normal(a, M * K, &rng);
        fill_normal(b, K * N, &rng);
        for (uint32_t m = 1; m <= M; m++)
            for (uint32_t n = 16; n <= N; n += 16) {
                for (uint32_t i = 0; i < M * N; i++)
                    c[i] = 1;
                kernels->matmul(a, K, b, N, c, N, m, K, n);
                for (uint32_t i = 0; i < M; i++)
                    for (uint32_t j = 0; j < N; j++) {
                        double exact = 1, size = 1;
                        for (uint32_t k = 0; k < K && i < m && j < n; k++) {
                            exact += (double)a[i * K + k] * b[k * N + j];
                            size += fabs((double)a[i * K + k] * b[k * N + j]);
                        }
                        assert_true(fabs(c[i * N + j] - exact) <= (K + 1) * pow(2, -24) * size);
                    }
            }
        float *x = aligned(64 * 4), sum;
        double exact[64], total = 0;
        for (uint32_t i = 0; i < 64; i++) {
            x[i] = i == 5 ? -INFINITY : 3 - (float)(i * i) / 40;
            exact[i] = exp((double)x[i] - 3);
            total += exact[i];
        }
        sum = kernels->exp_sum(x, 64, 3);
        for (uint32_t i = 0; i < 64; i++)
            assert_true(fabs(x[i] - exact[i]) <=
                        exact[i] * (pow(2, -21) + (i * i) / 40.0 * pow(2, -23)) + exp(-87));
        assert_true(fabs(sum - total) <= total * (pow(2, -21) + (64 + 2 * 87) * pow(2, -24)));
        free(x);
    }
    free(a);
    free(b);
    free(c);
}

/* format.md, "Chunk codes", written down a second time. */
static uint32_t chunk_code_by_the_document(const uint32_t *plane, uint32_t p, kvant_role role,
                                           uint32_t n_chunks, uint32_t token, uint32_t c)
{
    uint32_t h = token % 16 / 8, rt = token / 16, word, bit;
    if (role == KVANT_ROLE_K) {
        uint32_t position = 32 * h + 4 * (token % 8) + rt;
        word = 4 * p * (c / 2) + position % (4 * p);
        bit = p * (position / (4 * p)) + 16 * (c % 2);
    } else {
        uint32_t k = 8 * (token % 8 / 2) + 4 * h + rt;
        word = n_chunks * (k / (16 / p)) + c;
        bit = p * (k % (16 / p)) + 16 * (token % 2);
    }
    return plane[word] >> bit & ((1u << p) - 1);
}

/* Writes random codes twice, in a random order of tokens. All are where the document says, so no
 * two share a bit. */
static void check_chunks(kvant_role role, uint32_t n_chunks, uint32_t bits, uint64_t *rng)
{
    kvant_chunk_layout layout;
    static uint32_t codes[64][KVANT_MAX_HEAD_DIM], got[KVANT_MAX_HEAD_DIM];
    kvant_chunk_layout_init(&layout, role, n_chunks, bits);
    uint32_t *page = aligned(layout.code_bytes), start = (uint32_t)(test_random(rng) % 64);
    for (uint32_t i = 0; i < 128; i++) {
        uint32_t t = (start + 29 * i) % 64;
        for (uint32_t c = 0; c < n_chunks; c++)
            codes[t][c] = (uint32_t)(test_random(rng) >> 32) & ((1u << bits) - 1);
        kvant_chunk_layout_put(&layout, page, t, codes[t]);
    }
    for (uint32_t t = 0; t < 64; t++) {
        kvant_chunk_layout_get(&layout, page, t, got);
        assert_memory_equal(got, codes[t], n_chunks * sizeof *got);
        size_t first = 0;
        uint32_t shift = 0;
        for (uint32_t p = 16; p; p /= 2) {
            if (!(bits & p))
                continue;
            for (uint32_t c = 0; c < n_chunks; c++)
                assert_int_equal(chunk_code_by_the_document(page + first, p, role, n_chunks, t, c),
                                 codes[t][c] >> shift & ((1u << p) - 1));
            size_t words = role == KVANT_ROLE_K ? 4 * p * ((n_chunks + 1) / 2) : 2 * p * n_chunks;
            first += (words + 3) / 4 * 4;
            shift += p;
        }
        assert_int_equal(first * 4, layout.code_bytes);
    }
    free(page);
}

CASE(chunk_codes_lie_where_the_document_says)
{
    static const uint32_t counts[] = { 1, 2, 7, 16, 22, 43, 171 },
                          widths[] = { 1, 2, 4, 7, 10, 12, 13, 16, 19, 31 };
    uint64_t rng = 11;
    for (size_t i = 0; i < COUNT(counts); i++)
        for (size_t j = 0; j < COUNT(widths); j++) {
            check_chunks(KVANT_ROLE_K, counts[i], widths[j], &rng);
            check_chunks(KVANT_ROLE_V, counts[i], widths[j], &rng);
        }
}

RUN_CASES(NULL, NULL)
