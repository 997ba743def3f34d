/* test_learning_blocks.c - matrices of transform=first in blocks: blocks that move, large heads in
 * parts, and the codec of a transform. test_learning.c tests how matrices are learned. */
#include "learning_fixture.h"

static void check_refused(const fixture *f, const exported *e, size_t at, uint16_t half)
{
    uint8_t *data = malloc(e->bytes);
    memcpy(data, e->data, e->bytes);
    memcpy(data + at, &half, sizeof half);
    const uint64_t check = kvant_checksum_of(data, e->bytes - sizeof check);
    memcpy(data + e->bytes - sizeof check, &check, sizeof check);
    assert_int_equal(kvant_tensor_import(f->tensor, 3, data, e->bytes), KVANT_ERR_FORMAT);
    free(data);
}

/* Exported blocks contain their matrices. A block whose matrix has no good inverse is refused. */
static void moved_blocks_keep_matrices_of(kvant_role role)
{
    static const uint16_t bad[] = { 0, 0x8000, 0xbc00, 0x7c00,
                                    0x7e00 }; /* 0, -0, -1, infinity, NaN */
    const kind k = make_kind(21);
    text *t = make_text(&k, 22);
    fixture f = make_heads(spec, spec, role, 1, BLOCKS, 0), g = make_like(&f), h = make_like(&f);
    const size_t matrix = HEADER + 2 * WIDTH * sizeof(float),
                 step = matrix + (WIDTH / N_KV_HEADS - 1) * sizeof(uint16_t),
                 diagonal = matrix + WIDTH / N_KV_HEADS * sizeof(uint16_t);
    put(&f, t, 0, 1100, 256, 2);
    for (uint32_t block = 0; block < BLOCKS; block++) {
        exported e = export_block(&f, block);
        assert_int_equal(kvant_tensor_import(g.tensor, block, e.data, e.bytes), KVANT_OK);
        for (size_t i = 0; i < COUNT(bad) && block == 3; i++)
            check_refused(&h, &e, diagonal, bad[i]);
        for (size_t i = 3; i < COUNT(bad) && block == 3; i++)
            check_refused(&h, &e, step, bad[i]);
        free(e.data);
    }
    assert_int_equal(tensor_info_of(&h).written_blocks, 0);
    assert_int_equal(tensor_info_of(&g).n_transforms, tensor_info_of(&f).n_transforms);
    assert_int_equal(kvant_tensor_copy(f.tensor, 0, h.tensor, 0, BLOCKS), KVANT_OK);
    for (uint32_t block = 0; block < BLOCKS; block++) {
        exported e = export_block(&f, block), imported = export_block(&g, block),
                 copied = export_block(&h, block);
        assert_int_equal(e.bytes, imported.bytes);
        assert_memory_equal(e.data, imported.data, e.bytes);
        assert_int_equal(e.bytes, copied.bytes);
        assert_memory_equal(e.data, copied.data, e.bytes);
        free(e.data);
        free(imported.data);
        free(copied.data);
    }
    for (uint32_t slot = 0; slot < 1100; slot += 9) {
        float a[WIDTH], b[WIDTH];
        read_slot(&f, slot, a);
        read_slot(&g, slot, b);
        assert_memory_equal(a, b, sizeof a);
    }
    kvant_tensor_free(&g.tensor);
    free(g.memory);
    free(g.rows);
    kvant_tensor_free(&h.tensor);
    free(h.memory);
    free(h.rows);
    drop(&f);
    free(t);
}

CASE(moved_blocks_keep_their_matrices)
{
    moved_blocks_keep_matrices_of(KVANT_ROLE_K);
    moved_blocks_keep_matrices_of(KVANT_ROLE_V);
}

/* A transform has its triangles, and also (R W)^T where R is dense, as long as rows are written
 * with it. */
static void check_kept(kvant_tensor *tensor, kvant_key_transform *key_transform, const float *x,
                       const float *y)
{
    const uint32_t d = tensor->head_dim;
    const size_t center_and_scale = 2 * kvant_tensor_width(tensor) * sizeof(float);
    const size_t least = kvant_key_transform_halves(tensor) * sizeof(uint16_t) + center_and_scale;
    const kvant_transform *transform = &key_transform->transforms[0];
    const bool kept = transform->rotate == KVANT_ROTATE_DENSE && transform->part == d;
    const size_t square = kept ? (size_t)d * d * sizeof(float) : 0;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    kvant_transform made = tensor->codecs[0]->transform;
    float z[512];
    tensor->transforms[1].key_transform = key_transform;
    assert_int_equal(kvant_transforms_set_matrix(tensor, 1, 0, &made), KVANT_OK);
    for (int again = 0; again < 2; again++) {
        assert_int_equal(kvant_transforms_prepare(tensor, 1), KVANT_OK);
        kvant_transforms_age(tensor, 1);
        assert_in_range(kvant_key_transform_bytes(tensor), least + square, least + square + 512);
        assert_int_equal(key_transform->expanded != NULL, kept);
        if (kept)
            assert_memory_equal(key_transform->expanded, made.key_transform, square);
        kvant_transforms_age(tensor, 512);
        kvant_transforms_age(tensor, 1);
        assert_null(key_transform->expanded);
        assert_in_range(kvant_key_transform_bytes(tensor), least, least + 512);
        kvant_transform_forward(&key_transform->transforms[0], kernels, NULL, x, z);
        for (uint32_t j = 0; j < d; j++)
            assert_true(fabsf(z[j] - y[j]) <= 1e-4f);
    }
    free(made.key_transform);
}

/* Beyond 128 channels W is block diagonal. Rows read back and scores stay right in all parts. */
CASE(large_heads_have_parts)
{
    static const struct {
        uint32_t head_dim, part;
    } dims[] = { { 64, 64 },  { 80, 80 },  { 96, 96 },  { 127, 127 }, { 128, 128 }, { 256, 64 },
                 { 512, 64 }, { 192, 64 }, { 160, 40 }, { 136, 34 },  { 255, 255 } };
    uint64_t rng = 23;
    for (size_t i = 0; i < COUNT(dims); i++) {
        const uint32_t d = dims[i].head_dim, n = dims[i].part;
        kvant_codec *codec = make_codec(spec, d, KVANT_ROLE_K);
        kvant_tensor tensor = { .codecs = (const kvant_codec *[]){ codec },
                                .n_kv_heads = 1,
                                .head_dim = d };
        const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
        kvant_key_transform *key_transform;
        float x[512], q[512], y[512], p[512], back[512];
        assert_int_equal(kvant_key_transform_part(d), n);
        uint16_t *triangles = malloc(kvant_key_transform_halves(&tensor) * sizeof *triangles),
                 *at = triangles;
        for (uint32_t part = 0; part < d / n; part++, at += kvant_triangle_size(n))
            for (uint32_t row = 0; row < n; row++) {
                fill_normal(x, d, &rng);
                for (uint32_t j = 0; j < row; j++)
                    x[j] /= 64;
                x[row] = 0.5f + fabsf(x[row]);
                kvant_triangle_set_row(at, n, row, x);
            }
        assert_ptr_equal(at, triangles + kvant_key_transform_halves(&tensor));
        assert_ok(kvant_key_transform_create(&tensor, triangles, 2, &key_transform));
        fill_normal(x, d, &rng);
        fill_normal(q, d, &rng);
        kvant_transform_forward(&key_transform->transforms[0], kernels, NULL, x, y);
        kvant_transform_dual(&key_transform->transforms[0], kernels, 1, q, p);
        kvant_transform_inverse(&key_transform->transforms[0], kernels, NULL, y, back);
        double score = 0, other = 0, lengths = 0, error = 0, gain = 0, length = 0;
        for (uint32_t j = 0; j < d; j++) {
            score += (double)x[j] * q[j];
            other += (double)y[j] * p[j];
            lengths += fabs((double)y[j] * p[j]);
            error = fmax(error, fabs(back[j] - x[j]));
            gain += (double)y[j] * y[j];
            length += (double)x[j] * x[j];
        }
        assert_true(fabs(score - other) <= 1e-4 * lengths && error <= 1e-4);
        assert_true(gain <=
                    pow(kvant_transform_gain(&key_transform->transforms[0]), 2) * length * 1.0001);
        check_kept(&tensor, key_transform, x, y);
        kvant_key_transform_free(&key_transform);
        assert_null(key_transform);
        free(triangles);
        kvant_codec_free(&codec);
    }
}

CASE(parts_have_every_channel_once)
{
    static const uint32_t dims[] = { 17, 63, 64, 127, 128, 129, 136, 192, 255, 256, 512 };
    for (size_t i = 0; i < COUNT(dims); i++) {
        const uint32_t d = dims[i], n = kvant_key_transform_part(d);
        float x[512], part[512], back[512] = { 0 };
        for (uint32_t j = 0; j < d; j++)
            x[j] = (float)(j + 1);
        for (uint32_t p = 0; p < d / n; p++) {
            memset(part, 0, sizeof part);
            kvant_part_gather(d, n, p, x, part);
            for (uint32_t j = 0; j < n; j++)
                assert_true(part[j] == x[kvant_part_channel(d, n, p, j)]);
            kvant_part_scatter(d, n, p, part, back);
        }
        assert_memory_equal(back, x, d * sizeof *x);
    }
}

/* A block's transform as a codec, here with another quantiser. Both must agree on rows and queries
 * up to roundings. These decide no code of the page here. */
CASE(a_transform_is_a_codec)
{
    const kind k = make_kind(40);
    text *t = make_text(&k, 41);
    fixture f = make(spec, 1, BLOCKS, 0);
    kvant_codec *like, *made;
    uint8_t page[64 * 64 * 4];
    assert_ok(
        kvant_codec_create("trellis-4:transform=first", HEAD_DIM, KVANT_ROLE_K, 0, &like, NULL, 0));
    put(&f, t, 0, 320, 320, 1);
    for (uint32_t h = 0; h < N_KV_HEADS; h++) {
        const kvant_block_info block = block_of(&f, 2, h);
        assert_int_equal(kvant_tensor_make_codec(f.tensor, 2, h, block.codec, &made), KVANT_OK);
        memset(page, 0, sizeof page);
        assert_memory_equal(made->view.transform.center, block.affine.center,
                            HEAD_DIM * sizeof(float));
        assert_ok(kvant_codec_encode(made, &(kvant_affine){ made->view.transform.center, NULL },
                                     t->rows + 128 * WIDTH + (size_t)h * HEAD_DIM, WIDTH, 0, 64,
                                     page));
        assert_memory_equal(page, block.page, made->info.page_bytes);
        kvant_codec_free(&made);
        assert_int_equal(kvant_tensor_make_codec(f.tensor, 2, h, like, &made), KVANT_OK);
        float y[HEAD_DIM], z[HEAD_DIM];
        kvant_transform_forward(&made->transform, kvant_kernels_get(KVANT_CPU_AUTO), NULL, t->rows,
                                y);
        kvant_transform_dual(&made->transform, kvant_kernels_get(KVANT_CPU_AUTO), 1, t->queries, z);
        double exact = 0, ours = 0, length = 0;
        for (uint32_t j = 0; j < HEAD_DIM; j++) {
            exact += (double)t->rows[j] * t->queries[j];
            ours += (double)y[j] * z[j];
            length += fabs((double)y[j] * z[j]);
        }
        assert_true(fabs(ours - exact) < 1e-4 * length); /* roundings of binary32 */
        kvant_codec_free(&made);
    }
    assert_int_equal(kvant_tensor_make_codec(f.tensor, BLOCKS, 0, like, &made), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_tensor_make_codec(f.tensor, 0, N_KV_HEADS, like, &made),
                     KVANT_ERR_ARGUMENT);
    assert_null(made);
    kvant_codec_free(&like);
    drop(&f);
    free(t);
}

RUN_CASES(NULL, NULL)
