/* twins.c - see twins.h. */
#include "twins.h"

#include "../../src/cache/device.h"
#include "../../src/cache/tensor.h"

static kvant_cache *make_cache(kvant_scheme *scheme, const char *device, const spec_pair *spec,
                               uint32_t n_sequences, bool asynchronous)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    kvant_cache *cache;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS,
    params.head_dim = DIM;
    params.max_tokens = spec->max_tokens ? spec->max_tokens : MOST,
    params.max_sequences = n_sequences, params.n_threads = 2;
    params.scheme = scheme, params.device = device, params.asynchronous = asynchronous;
    if (kvant_cache_create(&params, &cache) != KVANT_OK)
        fail_msg("%s: %s", device, kvant_error_message());
    return cache;
}

/* Values on a GPU learn once. So the CPU's further transforms are marked as taken. */
static void read_transforms(const kvant_cache *cache)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t v = 2; v < 4; v++) {
            kvant_tensor_transform *transform =
                &kvant_cache_tensor(cache, layer, KVANT_ROLE_V)[0]->transforms[v];
            transform->alive = true;
            transform->n_blocks = 1;
        }
}

/* The most bytes of an exported block. */
static size_t room_for_block(const kvant_cache *cache)
{
    size_t bytes = sizeof(uint64_t);
    for (uint32_t i = 0; i < 2 * LAYERS; i++)
        bytes += sizeof(uint64_t) + kvant_tensor_export_size(cache->tensors[i]);
    return bytes;
}

void twins_new(twins *t, const spec_pair *spec, uint32_t n_sequences)
{
    kvant_scheme_params params = { .size = sizeof params,
                                   .preset = spec->preset,
                                   .k = spec->preset ? NULL : spec->k,
                                   .v = spec->preset ? NULL : spec->v,
                                   .calibration = spec->calibrated ? CALIBRATION : NULL };
    *t = (twins){ .spec = spec };
    if (kvant_scheme_create(&params, &t->scheme) != KVANT_OK)
        fail_msg("%s / %s: %s", spec->k, spec->v, kvant_error_message());
    t->cpu = make_cache(t->scheme, "cpu", spec, n_sequences, false);
    read_transforms(t->cpu);
    t->gpu = make_cache(t->scheme, "cuda:0", spec, n_sequences, spec->asynchronous);
    t->room = room_for_block(t->cpu);
    t->of_cpu = malloc(t->room);
    t->of_gpu = malloc(t->room);
}

void twins_free(twins *t)
{
    kvant_cache_free(&t->cpu);
    kvant_cache_free(&t->gpu);
    kvant_scheme_free(&t->scheme);
    free(t->of_cpu);
    free(t->of_gpu);
}

float *random_rows(size_t n, float size)
{
    float *rows = malloc((n ? n : 1) * sizeof *rows);
    for (size_t i = 0; i < n; i++)
        rows[i] = random_normal() * size + (i % DIM == 3 ? size / 2 : 0);
    return rows;
}

static kvant_status append_rows(twins *t, const int32_t *sequences, uint32_t n_sequences,
                                uint32_t layer, const float *k, const float *v, uint32_t n)
{
    const size_t bytes = (size_t)n_sequences * n * WIDTH * sizeof(float);
    void *gpu_k = device_copy(k, bytes), *gpu_v = device_copy(v, bytes);
    kvant_status of_cpu = kvant_cache_append_batch(t->cpu, layer, sequences, n_sequences, k, v, n),
                 of_gpu = kvant_cache_append_batch(t->gpu, layer, sequences, n_sequences, gpu_k,
                                                   gpu_v, n);
    if (of_cpu != of_gpu)
        fail_msg("%u tokens: status %d on the CPU, %d on the GPU: %s", n, of_cpu, of_gpu,
                 kvant_error_message());
    for (uint32_t i = 0; i < n_sequences; i++)
        assert_int_equal(kvant_sequence_length(t->gpu, sequences[i], layer),
                         kvant_sequence_length(t->cpu, sequences[i], layer));
    cudaFree(gpu_k);
    cudaFree(gpu_v);
    return of_gpu;
}

kvant_status twins_append_rows(twins *t, int32_t s, uint32_t layer, const float *k, const float *v,
                               uint32_t n)
{
    return append_rows(t, &s, 1, layer, k, v, n);
}

uint32_t twins_length(const twins *t, int32_t s)
{
    return kvant_sequence_length(t->gpu, s, 0);
}

float *twins_rows(const twins *t, size_t n, float size)
{
    float *rows = random_rows(n, t->spec->calibrated ? 1 : size);
    for (size_t i = 0; t->spec->calibrated && i < n; i++)
        rows[i] += (float)(i % DIM % 11) - (i % DIM == 3 ? 40.0f : 0.0f);
    return rows;
}

static bool append_some(twins *t, const int32_t *sequences, uint32_t n_sequences, uint32_t n)
{
    kvant_status status[LAYERS];
    uint32_t before[SEQUENCES];
    for (uint32_t i = 0; i < n_sequences; i++)
        before[i] = twins_length(t, sequences[i]);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const size_t size = (size_t)n_sequences * n * WIDTH;
        float *k = twins_rows(t, size, 0.5f), *v = twins_rows(t, size, 0.02f);
        status[layer] = append_rows(t, sequences, n_sequences, layer, k, v, n);
        assert_true(status[layer] == KVANT_OK || status[layer] == KVANT_ERR_FULL);
        free(k);
        free(v);
    }
    if (status[0] == KVANT_OK && status[LAYERS - 1] == KVANT_OK)
        return true;
    for (uint32_t i = 0; i < n_sequences; i++) {
        assert_int_equal(kvant_sequence_truncate(t->cpu, sequences[i], before[i]), KVANT_OK);
        assert_int_equal(kvant_sequence_truncate(t->gpu, sequences[i], before[i]), KVANT_OK);
    }
    return false;
}

bool twins_append(twins *t, int32_t s, uint32_t n)
{
    return append_some(t, &s, 1, n);
}

bool twins_append_all(twins *t, uint32_t n_sequences, uint32_t n)
{
    static const int32_t sequences[SEQUENCES] = { 0, 1, 2, 3 };
    return append_some(t, sequences, n_sequences, n);
}

static void note_queries(twins *t, uint32_t layer, uint32_t n)
{
    float *q = random_rows((size_t)n * Q_WIDTH, 1);
    void *gpu_q = device_copy(q, (size_t)n * Q_WIDTH * sizeof *q);
    const kvant_queries of_cpu = { sizeof of_cpu, q, Q_WIDTH, DIM, n, HEADS, NULL };
    kvant_queries of_gpu = of_cpu;
    of_gpu.q = gpu_q;
    assert_true(kvant_cache_wants_queries(t->cpu, layer, n) &&
                kvant_cache_wants_queries(t->gpu, layer, n));
    assert_int_equal(kvant_cache_note_queries(t->cpu, layer, &of_cpu), KVANT_OK);
    assert_int_equal(kvant_cache_note_queries(t->gpu, layer, &of_gpu), KVANT_OK);
    cudaFree(gpu_q);
    free(q);
}

/* Leaves one transform to choose. If there are two transforms of one kind, the CPU's samples may
 * prefer another than the GPU's second moments. */
static void forget_first(const kvant_cache *cache, uint32_t layer)
{
    kvant_tensor_transform *transforms =
        kvant_cache_tensor(cache, layer, KVANT_ROLE_K)[0]->transforms;
    assert_non_null(transforms[2].key_transform);
    assert_int_equal(transforms[1].n_blocks, 0);
    transforms[1].alive = false;
}

/* A GPU has room for two matrices and a transform of other rows, so the CPU's further transform is
 * marked as taken. */
static void take_last(const kvant_cache *cache, uint32_t layer)
{
    kvant_tensor_transform *last =
        &kvant_cache_tensor(cache, layer, KVANT_ROLE_K)[0]->transforms[4];
    last->alive = true;
    last->n_blocks = 1;
}

void twins_learn(twins *t)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        take_last(t->cpu, layer);
    for (int i = 0; i < 4; i++) { /* the second matrix needs 1920 rows */
        assert_int_equal(kvant_sequence_create(t->cpu), 0);
        assert_int_equal(kvant_sequence_create(t->gpu), 0);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            note_queries(t, layer, 512);
        assert_true(twins_append(t, 0, 512));
        twins_compare(t);
        twins_read(t, 0);
        kvant_sequence_free(t->cpu, 0);
        kvant_sequence_free(t->gpu, 0);
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_false(kvant_cache_wants_queries(t->cpu, layer, 1) ||
                     kvant_cache_wants_queries(t->gpu, layer, 512));
        forget_first(t->cpu, layer);
        forget_first(t->gpu, layer);
    }
}

static void compare_bytes(const twins *t, int32_t s, uint32_t block, size_t from, size_t end)
{
    for (size_t i = from; i < end; i++)
        if (t->of_cpu[i] != t->of_gpu[i])
            fail_msg(
                "%s / %s: sequence %d, block %u: byte %zu of its export is %02x, the CPU's %02x",
                t->spec->k, t->spec->v, s, block, i, t->of_gpu[i], t->of_cpu[i]);
}

/* Compares a block of a preset's cache. Both devices keep at least the same tokens exact, but not
 * the same blocks. Rows of a block that became exact again came from codes on one of the devices.
 * In caches that learn nothing, codes are equal if both devices have codes. */
static void compare_codes(const twins *t, int32_t s, uint32_t block)
{
    size_t cpu = sizeof(uint64_t), gpu = cpu;
    const uint32_t here = (uint32_t)t->cpu->sequences[s].table[block],
                   there = (uint32_t)t->gpu->sequences[s].table[block];
    for (uint32_t i = 0; i < 2 * LAYERS && t->spec->calibrated; i++) {
        uint64_t bytes[2];
        memcpy(&bytes[0], t->of_cpu + cpu, sizeof *bytes);
        memcpy(&bytes[1], t->of_gpu + gpu, sizeof *bytes);
        cpu += sizeof *bytes, gpu += sizeof *bytes;
        if (!kvant_slots_as_open(t->cpu->tensors[i], here, UINT64_MAX) &&
            !kvant_slots_as_open(t->gpu->tensors[i], there, UINT64_MAX) &&
            (bytes[0] != bytes[1] || memcmp(t->of_cpu + cpu, t->of_gpu + gpu, bytes[0]) != 0))
            fail_msg("%s: sequence %d, block %u: tensor %u has other codes than on the CPU",
                     t->spec->preset, s, block, i);
        cpu += bytes[0], gpu += bytes[1];
    }
}

size_t twins_export_from(const twins *t, const kvant_cache *cache, int32_t s, uint32_t block,
                         uint8_t *to)
{
    size_t bytes = 0;
    assert_int_equal(kvant_sequence_export_size(cache, s, block, 1, &bytes), KVANT_OK);
    assert_true(bytes <= t->room);
    if (kvant_sequence_export(cache, s, block, 1, to, bytes) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    return bytes;
}

size_t twins_export(twins *t, int32_t s, uint32_t block)
{
    const size_t used = twins_export_from(t, t->cpu, s, block, t->of_cpu),
                 again = twins_export_from(t, t->gpu, s, block, t->of_gpu);
    if (t->spec->preset) {
        compare_codes(t, s, block);
        return again;
    }
    assert_int_equal(again, used);
    compare_bytes(t, s, block, 0, used);
    return used;
}

/* Bytes of matrices, which differ on the device. */
static size_t learned_bytes(const kvant_cache *cache)
{
    size_t bytes = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (int role = 0; role < 2; role++) {
            kvant_tensor_info info = { .size = sizeof info };
            assert_int_equal(
                kvant_tensor_get_info(kvant_cache_tensor(cache, layer, (kvant_role)role)[0], &info),
                KVANT_OK);
            bytes += info.learned_bytes;
        }
    return bytes;
}

void twins_compare(twins *t)
{
    kvant_cache_info of_cpu = { .size = sizeof of_cpu }, of_gpu = { .size = sizeof of_gpu };
    for (int32_t s = 0; s < SEQUENCES; s++)
        for (uint32_t i = t->dropped[s]; i * 64 < twins_length(t, s); i++)
            twins_export(t, s, i);
    assert_int_equal(kvant_cache_get_info(t->cpu, &of_cpu), KVANT_OK);
    assert_int_equal(kvant_cache_get_info(t->gpu, &of_gpu), KVANT_OK);
    if (!t->spec->preset)
        assert_int_equal(of_gpu.bytes - learned_bytes(t->gpu),
                         of_cpu.bytes - learned_bytes(t->cpu));
    assert_int_equal(of_gpu.f16_bytes, of_cpu.f16_bytes);
    assert_int_equal(of_gpu.n_free_blocks, of_cpu.n_free_blocks);
    assert_true(of_gpu.true_bits == of_cpu.true_bits);
}

const kvant_codec *const *twins_codecs(twins *t, uint32_t layer, kvant_role role)
{
    kvant_scheme_location place = { .size = sizeof place,
                                    .role = role,
                                    .layer = layer,
                                    .n_layers = LAYERS,
                                    .n_kv_heads = KV_HEADS,
                                    .head_dim = DIM };
    const kvant_codec *const *codecs;
    assert_int_equal(kvant_scheme_codecs(t->scheme, &place, &codecs), KVANT_OK);
    return codecs;
}
