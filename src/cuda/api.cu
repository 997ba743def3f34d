/* api.cu - the functions of cuda.h that enqueue work: argument checks and launches, no arithmetic. */
#include "encode/append.h"
#include "encode/queries.h"
#include "attention/attention.h"
#include "attention/attention_pairs.h"
#include "chunks/chunks.cuh"
#include "trellis/trellis.cuh"
#include "pages/pages.h"
#include "table.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <iterator>

using namespace kvant;

namespace
{

constexpr uint32_t MAX_HEADS_A_KV = 64, MAX_HEADS = 65536;
constexpr uint32_t MAX_GRID_Y = 65535;

kvant_status from_cuda(cudaError_t error)
{
    if (error == cudaSuccess)
        return KVANT_OK;
    cudaGetLastError(); /* a refused launch leaves no error behind for the caller's own checks */
    const bool unsupported =
        error == cudaErrorNotSupported || error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver;
    return unsupported ? KVANT_ERR_UNSUPPORTED : KVANT_ERR_CUDA;
}

bool valid_type(kvant_cuda_type type)
{
    return type == KVANT_CUDA_F32 || type == KVANT_CUDA_F16 || type == KVANT_CUDA_BF16;
}

bool aligned(const void *pointer)
{
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

/* Pages are copied in pieces of 16 bytes. */
bool valid_pages(const kvant_cuda_pages &pages, size_t page_bytes, uint32_t n_kv_heads)
{
    return pages.base && aligned(pages.base) && pages.block_stride % 16 == 0 && pages.head_stride % 16 == 0 &&
           pages.block_stride >= page_bytes && (n_kv_heads == 1 || pages.head_stride >= page_bytes);
}

AppendRole role_of(const kvant_cuda_codec &codec, const kvant_cuda_pages &pages)
{
    AppendRole role{};
    role.codec = codec.params;
    role.book = &codec.book;
    role.trellis = &codec.trellis;
    role.wide_book = &codec.wide;
    role.base = static_cast<uint8_t *>(pages.base);
    role.block_stride = pages.block_stride;
    role.head_stride = pages.head_stride;
    return role;
}

bool has_groups(const kvant_cuda_params &codec)
{
    return codec.grouping != KVANT_CUDA_GROUP_TOKEN;
}

using AppendLaunch = cudaError_t (*)(const AppendArgs &, uint32_t, int, int, cudaStream_t);

AppendLaunch append_launch_of(const kvant_cuda_params &codec)
{
    switch (codec.codes) {
    case KVANT_CUDA_CODES_OPEN: return launch_append_open;
    case KVANT_CUDA_CODES_UNIFORM: return has_groups(codec) ? launch_seal_groups : launch_append;
    case KVANT_CUDA_CODES_CODEBOOK:
        return codec.kind == KVANT_CUDA_CODEBOOK_WIDE ? launch_append_wide : launch_append;
    case KVANT_CUDA_CODES_TRELLIS: return launch_append_trellis;
    case KVANT_CUDA_CODES_TRIPLETS:
    case KVANT_CUDA_CODES_QUATERNIONS: return launch_append_chunks;
    }
    return nullptr;
}

/* launch_append takes uniform codes and codebooks side by side; other launches take codes of one sort, a
 * trellis of one memory. */
bool share_launch(const kvant_cuda_params &a, const kvant_cuda_params &b)
{
    const AppendLaunch launch = append_launch_of(a);
    return launch == append_launch_of(b) && a.memory == b.memory && (launch == launch_append || a.codes == b.codes);
}

/* The roles of an append or a seal. */
struct Roles {
    AppendRole at[2];
    int n;
};

/* Roles first .. end - 1 in one launch; common: what all roles share. */
kvant_status launch_some(const Roles &roles, int first, int end, const AppendArgs &common, uint32_t n_kv_heads,
                         kvant_cuda_stream stream)
{
    AppendArgs args = common;
    std::copy(roles.at + first, roles.at + end, args.roles);
    const kvant_cuda_params &codec = args.roles[0].codec;
    return from_cuda(append_launch_of(codec)(args, codec.head_dim, end - first, (int)n_kv_heads,
                                             static_cast<cudaStream_t>(stream)));
}

kvant_status launch_roles(const Roles &roles, const AppendArgs &common, uint32_t n_kv_heads,
                          kvant_cuda_stream stream)
{
    if (common.n_tokens == 0)
        return KVANT_OK;
    if (roles.n == 1 || share_launch(roles.at[0].codec, roles.at[1].codec))
        return launch_some(roles, 0, roles.n, common, n_kv_heads, stream);
    const kvant_status status = launch_some(roles, 0, 1, common, n_kv_heads, stream);
    return status == KVANT_OK ? launch_some(roles, 1, 2, common, n_kv_heads, stream) : status;
}

/* A codec with weights needs them, another has no place for them. */
bool valid_weights(const kvant_cuda_params &codec, const float *weights)
{
    return (codec.weighting != KVANT_CUDA_WEIGHTING_NONE) == (weights != nullptr);
}

bool valid_rows(const kvant_cuda_rows &rows, uint32_t n_kv_heads)
{
    return !rows.codec || (rows.rows && valid_weights(rows.codec->params, rows.weights) &&
                           valid_pages(rows.pages, rows.codec->params.page_bytes, n_kv_heads));
}

void add_rows(Roles &to, const kvant_cuda_rows &rows)
{
    AppendRole &role = to.at[to.n++] = role_of(*rows.codec, rows.pages);
    role.rows = rows.rows;
    role.token_stride = rows.token_stride;
    role.row_head_stride = rows.head_stride;
    role.center = rows.center;
    role.factors = rows.factors;
    role.weights = rows.weights;
}

/* Open pages hold 16-bit rows. */
size_t open_bytes(const kvant_cuda_params &codec)
{
    return (size_t)KVANT_PAGE_TOKENS * codec.head_dim * sizeof(uint16_t);
}

bool valid_seal(const kvant_cuda_seal_pages &pages, uint32_t n_kv_heads)
{
    return !pages.codec || (pages.codec->params.codes != KVANT_CUDA_CODES_OPEN &&
                            valid_pages(pages.open, open_bytes(pages.codec->params), n_kv_heads) &&
                            valid_pages(pages.sealed, pages.codec->params.page_bytes, n_kv_heads));
}

void add_open_pages(Roles &to, const kvant_cuda_seal_pages &pages)
{
    AppendRole &role = to.at[to.n++] = role_of(*pages.codec, pages.sealed);
    role.codec.rotation = kvant_cuda_rotation{}; /* these rows are transformed already */
    role.codec.weighting = KVANT_CUDA_WEIGHTING_NONE;
    role.rows = pages.open.base;
    role.token_stride = role.codec.head_dim;
    role.row_head_stride = pages.open.head_stride / sizeof(uint16_t);
    role.row_block_stride = pages.open.block_stride / sizeof(uint16_t);
}

struct Device {
    int multiprocessors, major, shared_bytes; /* the most shared memory a block may have; all 0 on an error */
};

Device current_device()
{
    Device d{};
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
        cudaGetLastError();
        return Device{};
    }
    return d;
}

/* kernel is NULL for a pair that attention_pairs.h does not have. */
AttentionKernel find_kernel(const kvant_cuda_params &k, const kvant_cuda_params &v, bool large, bool open)
{
#define KVANT_FIND_PAIR(K, V)                                                                                      \
    if (k.kind == K::KIND && v.kind == V::KIND && k.memory == memory_of<K>() && v.memory == memory_of<V>())        \
        return pair_attention<K, V>(k.head_dim, large, open);
    KVANT_CUDA_ATTENTION_PAIRS(KVANT_FIND_PAIR)
#undef KVANT_FIND_PAIR
    return AttentionKernel{};
}

/* As many blocks as run at once: every further one would start with a cold ring. */
uint32_t grid_of(const Device &device)
{
    return device.multiprocessors < (int)MAX_BLOCKS ? (uint32_t)device.multiprocessors : MAX_BLOCKS;
}

kvant_status check_attention(const kvant_cuda_attention_args *args)
{
    if (!args || args->size != sizeof *args || !args->k_codec || !args->v_codec || !args->block_table ||
        !args->lengths || !args->q || !args->out || !args->workspace || !valid_type(args->type))
        return KVANT_ERR_ARGUMENT;
    kvant_status status = kvant_cuda_table_attention_check(args->k_codec, args->v_codec, NULL, 0);
    if (status != KVANT_OK)
        return status;
    const kvant_cuda_params &k = args->k_codec->params, &v = args->v_codec->params;
    if (args->batch == 0 || args->n_kv_heads == 0 || args->n_heads == 0 || args->n_heads % args->n_kv_heads != 0 ||
        args->blocks_per_row == 0 || args->blocks_per_row > INT_MAX / 64)
        return KVANT_ERR_ARGUMENT;
    if (!valid_pages(args->k, k.page_bytes, args->n_kv_heads) ||
        !valid_pages(args->v, v.page_bytes, args->n_kv_heads))
        return KVANT_ERR_ARGUMENT;
    const bool no_open = !args->k_open.base && !args->v_open.base;
    if (!no_open && (!valid_pages(args->k_open, open_bytes(k), args->n_kv_heads) ||
                     !valid_pages(args->v_open, open_bytes(v), args->n_kv_heads)))
        return KVANT_ERR_ARGUMENT;
    uint64_t groups = (args->n_heads / args->n_kv_heads + HEADS - 1) / HEADS;
    if ((uint64_t)args->batch * args->n_kv_heads * groups * args->blocks_per_row > INT_MAX / 2 ||
        args->n_heads > MAX_HEADS)
        return KVANT_ERR_ARGUMENT; /* the line of pages is counted in 32 bits; schedule.cuh divides numbers of heads */
    size_t needed = kvant_cuda_table_attention_workspace(k.head_dim);
    if (needed == 0)
        return KVANT_ERR_CUDA;
    if (reinterpret_cast<uintptr_t>(args->workspace) % 256 != 0 || args->workspace_bytes < needed)
        return KVANT_ERR_ARGUMENT;
    return args->n_heads / args->n_kv_heads > MAX_HEADS_A_KV ? KVANT_ERR_UNSUPPORTED : KVANT_OK;
}

PageSource source_of(const kvant_cuda_pages &pages, size_t bytes)
{
    return PageSource{ static_cast<const uint8_t *>(pages.base), pages.block_stride, pages.head_stride,
                       (uint32_t)bytes };
}

AttentionArgs launch_args(const kvant_cuda_attention_args &args)
{
    const kvant_cuda_params &k = args.k_codec->params, &v = args.v_codec->params;
    int heads_a_kv = (int)(args.n_heads / args.n_kv_heads), groups = (heads_a_kv + (int)HEADS - 1) / (int)HEADS;
    AttentionArgs p{};
    const kvant_codec_info &k_info = args.k_codec->info, &v_info = args.v_codec->info;
    p.k = source_of(args.k, k_info.metadata_offset + k_info.metadata_bytes);
    p.v = source_of(args.v, v_info.metadata_offset + v_info.metadata_bytes);
    p.k_open = source_of(args.k_open, open_bytes(k));
    p.v_open = source_of(args.v_open, open_bytes(v));
    p.table = args.block_table;
    p.table_stride = args.table_stride;
    p.lengths = args.lengths;
    p.batch = (int)args.batch;
    p.max_tokens = (int)args.blocks_per_row * 64;
    p.kv_heads = (int)args.n_kv_heads;
    p.groups = groups;
    p.heads_a_kv = heads_a_kv;
    p.heads_a_group = (heads_a_kv + groups - 1) / groups;
    p.type = args.type;
    p.q = args.q;
    p.q_batch_stride = args.q_batch_stride;
    p.q_head_stride = args.q_head_stride;
    p.out = args.out;
    p.out_batch_stride = args.out_batch_stride;
    p.out_head_stride = args.out_head_stride;
    p.lse = args.lse;
    p.v_center = args.v_center;
    p.k_factors = args.k_factors;
    p.v_factors = args.v_factors;
    p.scale_log2 = args.scale * 1.44269504088896341f;
    p.counters = static_cast<uint32_t *>(args.workspace);
    p.partials = reinterpret_cast<float *>(static_cast<uint8_t *>(args.workspace) + COUNTER_BYTES);
    p.k_rotation = k.rotation;
    p.v_rotation = v.rotation;
    /* keys of codebooks are multiplied as signed bytes, values and a trellis as small numbers above 0 */
    const uint32_t to_signed = k.bias == 128 && k.codes != KVANT_CUDA_CODES_TRELLIS ? 0x80808080u : 0;
    for (uint32_t i = 0; i < KVANT_CUDA_TABLE_WORDS; i++)
        p.k_bytes[i] = k.bytes[i] ^ to_signed, p.v_bytes[i] = v.bytes[i];
    p.one = 1;
    p.k_step = k.step, p.v_step = v.step, p.k_bias = to_signed ? 0 : k.bias, p.v_bias = v.bias;
    p.k_symmetric = (int)k.symmetric, p.v_symmetric = (int)v.symmetric;
    p.k_offset = k.offset, p.v_offset = v.offset;
    return p;
}

void copy_directions(kvant_cuda_directions &to, const kvant_cuda_book &book)
{
    std::copy(std::begin(book.direction), std::end(book.direction), to.direction);
    std::copy(std::begin(book.norm), std::end(book.norm), to.norm);
    for (uint32_t i = 0; i < book.n_secondaries; i++)
        std::copy(std::begin(book.secondaries[i]), std::end(book.secondaries[i]), to.secondaries[i]);
}

} // namespace

kvant_status kvant_cuda_table_device_check(char *err, size_t errlen)
{
    const kvant_cuda_error message = { err, errlen };
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0)
        return KVANT_OK;
    return kvant_cuda_refuse(&message, from_cuda(error == cudaSuccess ? cudaErrorNoDevice : error),
                             "no NVIDIA driver or no GPU that can be used: %s",
                             cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
}

kvant_status kvant_cuda_table_append(const kvant_cuda_append_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->slots || !valid_type(args->type) || args->n_kv_heads == 0 ||
        args->n_kv_heads > MAX_GRID_Y || !valid_rows(args->k, args->n_kv_heads) ||
        !valid_rows(args->v, args->n_kv_heads))
        return KVANT_ERR_ARGUMENT;
    Roles roles{};
    for (const kvant_cuda_rows *rows : { &args->k, &args->v }) {
        if (!rows->codec)
            continue;
        if (has_groups(rows->codec->params))
            return KVANT_ERR_UNSUPPORTED;
        add_rows(roles, *rows);
    }
    if ((!args->k.codec && !args->v.codec) ||
        (args->k.codec && args->v.codec && args->k.codec->params.head_dim != args->v.codec->params.head_dim))
        return KVANT_ERR_ARGUMENT;
    AppendArgs common{};
    common.type = args->type;
    common.n_tokens = args->n_tokens;
    common.slots = args->slots;
    common.refused = args->refused;
    return launch_roles(roles, common, args->n_kv_heads, stream);
}

kvant_status kvant_cuda_table_seal(const kvant_cuda_seal_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->from || !args->to || args->n_kv_heads == 0 ||
        args->n_kv_heads > MAX_GRID_Y || args->n_blocks > INT_MAX / KVANT_PAGE_TOKENS ||
        !valid_seal(args->k, args->n_kv_heads) || !valid_seal(args->v, args->n_kv_heads))
        return KVANT_ERR_ARGUMENT;
    Roles roles{};
    for (const kvant_cuda_seal_pages *pages : { &args->k, &args->v })
        if (pages->codec)
            add_open_pages(roles, *pages);
    if ((!args->k.codec && !args->v.codec) ||
        (args->k.codec && args->v.codec && args->k.codec->params.head_dim != args->v.codec->params.head_dim))
        return KVANT_ERR_ARGUMENT;
    AppendArgs common{};
    common.type = KVANT_CUDA_F16;
    common.n_tokens = args->n_blocks * KVANT_PAGE_TOKENS;
    common.refused = args->refused;
    common.from = args->from;
    common.to = args->to;
    common.tokens = args->tokens;
    return launch_roles(roles, common, args->n_kv_heads, stream);
}

kvant_status kvant_cuda_table_attention_check(const kvant_cuda_codec *k_codec, const kvant_cuda_codec *v_codec,
                                              char *err, size_t errlen)
{
    const kvant_cuda_error error = { err, errlen };
    if (!k_codec || !v_codec)
        return kvant_cuda_refuse(&error, KVANT_ERR_ARGUMENT, "no codec of keys, or none of values");
    const kvant_cuda_params &k = k_codec->params, &v = v_codec->params;
    if (k.role != KVANT_ROLE_K || v.role != KVANT_ROLE_V)
        return kvant_cuda_refuse(&error, KVANT_ERR_ARGUMENT,
                                 "the first codec must be one of keys, the second one of values");
    if (k.head_dim != v.head_dim)
        return kvant_cuda_refuse(&error, KVANT_ERR_ARGUMENT, "keys and values have different head_dim");
    if (find_kernel(k, v, true, true).kernel)
        return KVANT_OK;
    return kvant_cuda_refuse(
        &error, KVANT_ERR_UNSUPPORTED,
        "not on the GPU: attention over keys %s with values %s; pairs are of one kind and width, or of "
        "keys with at least 4 bits (turboquant: 3) and values with fewer (kvant/cuda.h lists them)",
        k_codec->info.spec, v_codec->info.spec);
}

size_t kvant_cuda_table_attention_workspace(uint32_t head_dim)
{
    uint32_t blocks = grid_of(current_device());
    if (blocks == 0 || head_dim == 0 || head_dim > KVANT_CUDA_MAX_DIM)
        return 0;
    return COUNTER_BYTES + (size_t)blocks * 2 * partial_floats(head_dim) * sizeof(float);
}

kvant_status kvant_cuda_table_attention(const kvant_cuda_attention_args *args, kvant_cuda_stream stream)
{
    kvant_status status = check_attention(args);
    if (status != KVANT_OK)
        return status;
    Device device = current_device();
    AttentionKernel kernel =
        find_kernel(args->k_codec->params, args->v_codec->params, device.major >= 9, args->k_open.base);
    if (!kernel.kernel || kernel.shared_bytes > device.shared_bytes)
        return KVANT_ERR_UNSUPPORTED;
    cudaError_t error =
        cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes);
    if (error != cudaSuccess)
        return from_cuda(error);
    ChunkAttentionArgs p{};
    static_cast<AttentionArgs &>(p) = launch_args(*args);
    if (kvant_cuda_has_chunks(&args->k_codec->params))
        copy_directions(p.k_directions, args->k_codec->book);
    if (kvant_cuda_has_chunks(&args->v_codec->params))
        copy_directions(p.v_directions, args->v_codec->book);
    void *parameters[] = { &p };
    return from_cuda(cudaLaunchKernel(kernel.kernel, grid_of(device), kernel.threads, parameters,
                                      kernel.shared_bytes, static_cast<cudaStream_t>(stream)));
}

kvant_status kvant_cuda_table_transform_queries(const kvant_cuda_query_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->k_codec || !args->q || !args->out || !args->inverse_weights ||
        !valid_type(args->type) || args->n_kv_heads == 0 || args->n_heads == 0 ||
        args->n_heads % args->n_kv_heads != 0 || args->n_kv_heads > MAX_GRID_Y || args->batch > MAX_GRID_Y)
        return KVANT_ERR_ARGUMENT;
    const kvant_cuda_params &codec = args->k_codec->params;
    if (codec.weighting != KVANT_CUDA_WEIGHTING_FULL)
        return KVANT_ERR_ARGUMENT;
    if (args->batch == 0)
        return KVANT_OK;
    const QueryArgs p{ args->type,
                       args->q,
                       args->q_batch_stride,
                       args->q_head_stride,
                       args->inverse_weights,
                       args->out,
                       args->n_heads / args->n_kv_heads };
    return from_cuda(
        launch_queries(p, codec.head_dim, args->batch, args->n_kv_heads, static_cast<cudaStream_t>(stream)));
}

kvant_status kvant_cuda_table_decode(const kvant_cuda_decode_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->codec || !args->blocks || !args->out ||
        !valid_type(args->type) || args->n_kv_heads == 0 || args->n_kv_heads > MAX_GRID_Y ||
        args->n_blocks > INT_MAX)
        return KVANT_ERR_ARGUMENT;
    const kvant_cuda_params &codec = args->codec->params;
    if (!valid_pages(args->pages, codec.page_bytes, args->n_kv_heads) ||
        !valid_weights(codec, args->inverse_weights))
        return KVANT_ERR_ARGUMENT;
    if (args->n_blocks == 0)
        return KVANT_OK;
    DecodeArgs p{ codec,
                  static_cast<const uint8_t *>(args->pages.base),
                  args->pages.block_stride,
                  args->pages.head_stride,
                  args->blocks,
                  args->type,
                  args->out,
                  args->token_stride,
                  args->head_stride,
                  args->center,
                  args->factors,
                  args->inverse_weights };
    if (kvant_cuda_has_chunks(&codec))
        return from_cuda(launch_decode_chunks(p, args->codec->book, codec.head_dim, args->n_blocks,
                                              args->n_kv_heads, static_cast<cudaStream_t>(stream)));
    if (codec.kind == KVANT_CUDA_CODEBOOK_WIDE)
        return from_cuda(launch_decode_wide(p, args->codec->wide, codec.head_dim, args->n_blocks, args->n_kv_heads,
                                            static_cast<cudaStream_t>(stream)));
    if (codec.codes == KVANT_CUDA_CODES_TRELLIS)
        return from_cuda(launch_decode_trellis(p, args->codec->trellis, codec.head_dim, args->n_blocks,
                                               args->n_kv_heads, static_cast<cudaStream_t>(stream)));
    return from_cuda(
        launch_decode(p, codec.head_dim, args->n_blocks, args->n_kv_heads, static_cast<cudaStream_t>(stream)));
}

kvant_status kvant_cuda_table_copy_blocks(const kvant_cuda_pages *pages, size_t page_bytes, uint32_t n_kv_heads,
                                          const int32_t *from, const int32_t *to, uint32_t n,
                                          kvant_cuda_stream stream)
{
    if (!pages || !from || !to || page_bytes == 0 || page_bytes % 16 != 0 || n_kv_heads == 0 ||
        n_kv_heads > MAX_GRID_Y || n > INT_MAX || !valid_pages(*pages, page_bytes, n_kv_heads))
        return KVANT_ERR_ARGUMENT;
    if (n == 0)
        return KVANT_OK;
    CopyArgs p{
        static_cast<uint8_t *>(pages->base), pages->block_stride, pages->head_stride, page_bytes, from, to
    };
    return from_cuda(launch_copy(p, n, n_kv_heads, static_cast<cudaStream_t>(stream)));
}
