/* kv_size.c - see kv_size.h. Computes the sizes of one tensor; kv_bind.c and buffer_region.c
 * add them up.
 *
 * `kvant_tensor` tells the bytes of a tensor in the computer's memory. gpu/size.c tells the bytes
 * of the arrays on a GPU. */
#include <kvant/cuda.h>

#include "gpu/gpu.h"
#include "kv_steps.h"
#include "kv_tensor.h"

/* Bytes of the arrays that codecs copied from a calibration. Each kv head has its own. */
size_t kvp_kv_calibrated_bytes(const kvant_codec *const *codecs, uint32_t n)
{
    size_t numbers = 0;

    for (uint32_t head = 0; head < n; head++) {
        const kvant_cuda_tables tables = kvp_gpu_tables(codecs[head]);
        const size_t vectors = (size_t)(tables.center != NULL) + (size_t)(tables.scale != NULL);
        numbers += 2 * tables.key_transform_size;
        if (vectors > 0) {
            kvant_codec_info info = { .size = sizeof(info) };
            kvant_codec_get_info(codecs[head], &info);
            numbers += vectors * info.head_dim;
        }
    }
    return numbers * sizeof(float);
}

static double codec_bits(const kvant_codec *const *codecs, uint32_t n)
{
    kvant_codec_info info = { .size = sizeof(info) };
    double bits = 0;

    for (uint32_t head = 0; head < n; head++) {
        kvant_codec_get_info(codecs[head], &info);
        bits += info.true_bits / n;
    }
    return bits;
}

/* Only a graph tells how RoPE rotates keys. A tensor makes the most transforms when it knows RoPE,
 * so this function asks it with a RoPE. */
kvant_tensor_info kvp_kv_info_up_to(const kvp_kv *kv, uint32_t n_positions)
{
    static const float still = 0;
    const kvant_rope rope = { .size = sizeof(rope),
                              .n_dims = 2,
                              .frequencies = &still,
                              .n_positions = n_positions,
                              .block_centers = 1 };
    kvant_tensor_info info = { .size = sizeof(info) };

    if (kvant_tensor_set_rope(kv->tensor, &rope) != KVANT_OK)
        return info;
    kvant_tensor_get_info(kv->tensor, &info);
    kvant_tensor_set_rope(kv->tensor, NULL);
    return info;
}

/* Bytes of pages and fp16 pages when each stream is one sequence, without the pages that tensors
 * share. A pool for specs has two spare fp16 blocks, which one sequence never uses. */
static double page_bytes(const kvp_kv *kv, const kvant_codec *const *codecs, uint32_t n_kv_heads,
                         double sealed)
{
    const kvp_kv_shape *shape = &kv->shape;
    const double fp16_block = (double)KVANT_PAGE_TOKENS * shape->row * sizeof(uint16_t);
    const uint32_t n_blocks = kvp_kv_blocks(shape);
    const kvant_exact_part part = kvp_kv_exact(shape, kv->settings, shape->n_streams);
    const kvant_tensor_params params = { .size = sizeof(params),
                                         .n_sequences = shape->n_streams,
                                         .n_blocks = n_blocks,
                                         .blocks_per_sequence = n_blocks / shape->n_streams,
                                         .n_kv_heads = n_kv_heads,
                                         .codecs = codecs,
                                         .exact = &part,
                                         .steps = kvp_steps_none() };
    size_t bytes = 0;
    const double spare = part.step > 0 ? 0 : 2 * fp16_block;

    kvant_tensor_size(&params, &bytes);
    return (double)bytes > sealed + spare ? (double)bytes - spare : sealed;
}

static void add_computers(const kvp_kv *kv, const kvant_codec *const *codecs, uint32_t n_kv_heads,
                          double sealed, kvp_kv_size *size)
{
    const kvant_tensor_info full = kvp_kv_info_up_to(kv, kvp_kv_n_positions(kv));

    size->transforms = (double)(full.learned_most + kvp_kv_calibrated_bytes(codecs, n_kv_heads));
    size->bytes = page_bytes(kv, codecs, n_kv_heads, sealed) + (double)kv->shared;
    size->exact = size->bytes - sealed;
    size->bytes += size->transforms;
    size->working = (double)full.working_most;
}

/* Adds a GPU's arrays. All reserved bytes count, even bytes that only another head_dim would have
 * needed. kvp_kv_size_add adds the memory that tensors share (room, staging and matrices). */
static bool add_gpus(const kvp_kv *kv, const kvant_codec *const *codecs, uint32_t n_kv_heads,
                     kvp_kv_size *size)
{
    kvp_kv_shape shape = kv->shape;
    char err[512];
    size_t reserved;

    shape.in_order = true;
    reserved = kvp_kv_reserve_with(kv->settings, &shape, err, sizeof(err));
    size->exact = (double)kvp_kv_open_bytes(&shape, kv->settings);
    size->transforms =
        (double)kvp_gpu_transform_bytes(&shape, codecs, n_kv_heads, kvp_kv_n_positions(kv));
    size->bytes = (double)reserved + size->transforms;
    size->working = (double)kvp_gpu_plain_bytes(&shape, codecs, n_kv_heads);
    size->room = (double)kvp_gpu_learning_room(&shape, kv->settings);
    size->staging = (double)kvp_gpu_staging_room(&shape, kv->settings);
    size->matrices = (double)kvp_gpu_matrix_room(&shape, codecs, n_kv_heads);
    return reserved != 0;
}

bool kvp_kv_full_size(const kvp_kv *kv, const kvant_codec *const *codecs, bool on_gpu,
                      kvp_kv_size *size)
{
    const uint32_t n_kv_heads = kv->shape.row / kv->head_dim;
    const double cells = (double)kv->shape.n_cells * kv->shape.n_streams;
    const double numbers = cells * kv->shape.row;

    *size = (kvp_kv_size){ .size = sizeof(*size), .cells = cells };
    size->numbers[kv->shape.role] = numbers;
    size->codec_bits = numbers * codec_bits(codecs, n_kv_heads);
    if (on_gpu && kv->shape.latents) { /* uncompressed there */
        size->codec_bits = 16 * numbers;
        size->bytes = 2 * numbers;
        return true;
    }
    if (on_gpu)
        return add_gpus(kv, codecs, n_kv_heads, size);
    if (kv->tensor == NULL)
        return false;
    add_computers(kv, codecs, n_kv_heads, size->codec_bits / 8, size);
    return true;
}

void kvp_kv_size_add(kvp_kv_size *sum, const kvp_kv_size *part)
{
    const double room = sum->room > part->room ? sum->room : part->room;
    const double staging = sum->staging > part->staging ? sum->staging : part->staging;
    const double matrices = sum->matrices > part->matrices ? sum->matrices : part->matrices;

    sum->cells = sum->cells > part->cells ? sum->cells : part->cells;
    for (int role = 0; role < 2; role++)
        sum->numbers[role] += part->numbers[role];
    sum->codec_bits += part->codec_bits;
    sum->bytes += part->bytes + (staging - sum->staging) + (matrices - sum->matrices);
    sum->exact += part->exact + (staging - sum->staging);
    sum->staging = staging;
    sum->transforms += part->transforms + (matrices - sum->matrices);
    sum->matrices = matrices;
    sum->working += part->working + (room - sum->room);
    sum->room = room;
}
