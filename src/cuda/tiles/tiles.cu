/* tiles.cu - chooses the shape of a tile kernel, and launches it. */
#include "tiles.h"

#include "../checks.h"
#include "../launch.h"
#include "../papers/chunks.cuh"
#include "../trellis/trellis_pairs.cuh"
#include "code_pairs.h"
#include "../papers/unpack_chunks.cuh"

#include <algorithm>
#include <climits>
#include <iterator>

namespace kvant
{

static_assert(COUNTER_BYTES <= KVANT_CUDA_COUNTER_BYTES, "cuda.h says which bytes must be zero");

size_t tile_workspace(uint32_t head_dim, uint32_t multiprocessors)
{
    return (size_t)multiprocessors * MOST_TILE_ROWS * (head_dim + 2) * sizeof(float);
}

constexpr int MOST_TABLE_USERS = 8; /* the most warps that share a table */

static TileKernel kernel_of(uint32_t head_dim)
{
    switch (head_dim) {
    case 64: return tile_kernel_of<64>();
    case 96: return tile_kernel_of<96>();
    case 128: return tile_kernel_of<128>();
    case 256: return tile_kernel_of<256>();
    default: return TileKernel{};
    }
}

static UnpackedKernels unpacked_kernels(uint32_t head_dim)
{
    switch (head_dim) {
    case 64: return unpacked_kernels_of<64>();
    case 96: return unpacked_kernels_of<96>();
    case 128: return unpacked_kernels_of<128>();
    case 256: return unpacked_kernels_of<256>();
    default: return UnpackedKernels{};
    }
}

/* unpack_*.cuh describe these tables. looks_up: include the large tables of trellises and chunks,
 * for which a slower way without a table exists. */
template <class C> static int chunk_bytes(bool looks_up)
{
    /* bytes of norms */
    if (C::CHANNELS == 3)
        return C::ENTRIES * C::ENTRY_BYTES * (looks_up ? tile_copies<C>() : 1) + 32;
    return looks_up ? (C::ENTRIES * C::ENTRY_BYTES + 15) / 16 * 16 : 0;
}

static int table_bytes_of(const kvant_cuda_params &codec, bool looks_up)
{
    switch (codec.kind) {
#define KVANT_CUDA_CASE(KIND, C)                                                                   \
    case KIND: return chunk_bytes<C>(looks_up);
        KVANT_CUDA_CHUNK_KINDS(KVANT_CUDA_CASE)
#undef KVANT_CUDA_CASE
    case KVANT_CUDA_CODEBOOK_WIDE: return 4 << codec.bits;
    default: break;
    }
    if (codec.codes != KVANT_CUDA_CODES_TRELLIS)
        return 0;
    if (!looks_up)
        return (int)(KVANT_CUDA_TRELLIS_LEVELS * 4 + MOST_TABLE_USERS * codec.head_dim);
    return codec.bits == 2   ? level_bytes<Trellis2>(TRELLIS_COPIES)
           : codec.bits == 3 ? level_bytes<Trellis3>(TRELLIS_COPIES)
                             : level_bytes<Trellis4>(TRELLIS_COPIES);
}

static void choose_table(TileCodec &codec, bool looks_up)
{
    codec.looks_up = looks_up;
    codec.table_bytes = table_bytes_of(codec.params, looks_up);
}

/* Whether keys and values have the same table. */
static bool share_table(const TileCodec &a, const TileCodec &b)
{
    return a.params.kind == b.params.kind && a.looks_up == b.looks_up &&
           (a.params.codes == KVANT_CUDA_CODES_TRIPLETS ||
            (a.params.codes == KVANT_CUDA_CODES_TRELLIS && a.looks_up));
}

static TileCodec tile_codec(const kvant_cuda_codec &codec)
{
    TileCodec c{};
    c.params = codec.params;
    c.trellis = codec.trellis;
    c.directions = codec.directions;
    std::copy(std::begin(codec.wide.values), std::end(codec.wide.values), c.levels);
    return c;
}

static int round_up(int n, int unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Lays out tables from `at` on, then `rings` rings of codes; returns the end. */
static int lay_out_codes(TileArgs &p, int at, bool looks_up, int ring, int rings)
{
    choose_table(p.keys, looks_up);
    choose_table(p.values, looks_up);
    if (share_table(p.keys, p.values))
        p.values.table_bytes = 0;
    p.ring = ring;
    p.k_table_at = round_up(at, 16);
    p.v_table_at =
        p.values.table_bytes ? round_up(p.k_table_at + p.keys.table_bytes, 16) : p.k_table_at;
    p.ring_at = round_up(
        std::max(p.k_table_at + p.keys.table_bytes, p.v_table_at + p.values.table_bytes), 16);
    p.k_page = round_up((int)p.k.bytes, 16);
    p.v_page = round_up((int)p.v.bytes, 16);
    return p.ring_at + rings * ring * (p.k_page + p.v_page);
}

/* Lays out a tile kernel's shared memory and returns its size in bytes. */
static int lay_out(TileArgs &p, const TileKernel &kernel, int row_groups, int stages, int ring,
                   bool looks_up)
{
    p.row_groups = row_groups;
    p.stages = stages;
    return lay_out_codes(p, kernel.fixed_bytes[row_groups - 1][stages - 1], looks_up, ring, 1);
}

/* The shapes in the order in which they are tried, with or without large tables. */
static constexpr struct {
    int stages, ring;
    bool looks_up;
} shapes[] = { { 2, 4, true },  { 2, 3, true },  { 1, 4, true },  { 1, 3, true },
               { 2, 3, false }, { 1, 3, false }, { 2, 0, false }, { 1, 0, false } };

/* Tries two row groups first, if there are enough rows. Returns the bytes of shared memory, or 0
 * when there is too little. */
static int choose_shape(TileArgs &p, const TileKernel &kernel, int64_t rows, int room)
{
    for (int groups = rows > GROUP_ROWS ? kernel.groups : 1; groups > 0; groups--)
        for (const auto &shape : shapes) {
            const int bytes = lay_out(p, kernel, groups, shape.stages, shape.ring, shape.looks_up);
            if (bytes <= room)
                return bytes;
        }
    return 0;
}

static cudaError_t launch(const void *kernel, int64_t blocks, int threads, int bytes, void *args,
                          cudaStream_t stream)
{
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess)
        return error;
    void *parameters[] = { args };
    return cudaLaunchKernel(kernel, dim3((unsigned)blocks), dim3((unsigned)threads), parameters,
                            (size_t)bytes, stream);
}

/* The same for a kernel that calls wait_for_prior. */
static cudaError_t launch_after(const void *kernel, int64_t blocks, int threads, int bytes,
                                void *args, cudaStream_t stream)
{
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    void *parameters[] = { args };
    return error == cudaSuccess ? launch_early(kernel, dim3((unsigned)blocks), (unsigned)threads,
                                               parameters, (size_t)bytes, stream)
                                : error;
}

/* Cuts `pairs` pairs into tiles; returns the number of thread blocks, or 0 if there are too
 * many. */
static int64_t cut(TileShape &p, int pairs, int multiprocessors)
{
    const int64_t rows = (int64_t)p.query_tokens * p.heads_a_kv,
                  tile_rows = p.row_groups * GROUP_ROWS, tiles = (rows + tile_rows - 1) / tile_rows,
                  items = tiles * pairs;
    p.pairs = pairs;
    p.tiles = (int)tiles;
    p.splits = (int)std::max<int64_t>(
        std::min<int64_t>(multiprocessors / items, p.max_tokens / (4 * KVANT_PAGE_TOKENS)), 1);
    return items * p.splits <= INT_MAX ? items * p.splits : 0;
}

/* ---- unpacked pages ---- */

/* Lays out the kernel that unpacks; returns 0 if there is not enough shared memory. */
static int lay_out_unpack(TileArgs &p, const UnpackedKernels &k, bool looks_up, int room)
{
    const int bytes = lay_out_codes(p, k.unpack_groups * std::max(k.key_bytes, k.value_bytes),
                                    looks_up, 2, k.unpack_groups / 2);
    return bytes <= room ? bytes : 0;
}

static int lay_out_attend(TileShape &p, const UnpackedKernels &k, int room)
{
    for (p.row_groups = k.attend_groups; p.row_groups > 0; p.row_groups--)
        for (p.stages = MOST_STAGES; p.stages > 1; p.stages--)
            if (k.shared_bytes[p.row_groups - 1][p.stages - 1] <= room)
                return k.shared_bytes[p.row_groups - 1][p.stages - 1];
    return 0;
}

/* The number of pairs per launch, such that as few rounds of thread blocks as possible are
 * needed. */
static int pairs_at_once(const TileShape &p, int64_t most, int multiprocessors)
{
    const int pairs = p.batch * p.kv_heads;
    const int64_t tile_rows = p.row_groups * GROUP_ROWS,
                  tiles = ((int64_t)p.query_tokens * p.heads_a_kv + tile_rows - 1) / tile_rows;
    int best = 1;
    int64_t best_rounds = INT64_MAX;
    for (int n = 1; n <= std::min<int64_t>(most, pairs); n++) {
        auto rounds_of = [&](int64_t items) {
            return (items * tiles + multiprocessors - 1) / multiprocessors;
        };
        const int64_t rounds = pairs / n * rounds_of(n) + rounds_of(pairs % n);
        if (rounds <= best_rounds)
            best_rounds = rounds, best = n;
    }
    return best;
}

/* Launches the kernels that unpack to scratch in device memory. KVANT_ERR_UNSUPPORTED when there is
 * too little scratch or shared memory. */
static kvant_status launch_unpacked(const kvant_cuda_kernel_attention_args &args, TileArgs p,
                                    size_t scratch_at, int multiprocessors, int shared_bytes,
                                    cudaStream_t stream)
{
    const uint32_t head_dim = args.k_codec->params.head_dim;
    uint8_t *scratch = static_cast<uint8_t *>(args.workspace) + scratch_at;
    const UnpackedKernels k = unpacked_kernels(head_dim);
    if (!k.unpack)
        return KVANT_ERR_UNSUPPORTED;
    /* minus room for barriers, and for the alignment of matrices */
    const int room = shared_bytes - 1024;
    int unpack_bytes = lay_out_unpack(p, k, true, room);
    unpack_bytes = unpack_bytes ? unpack_bytes : lay_out_unpack(p, k, false, room);
    const int attend_bytes = lay_out_attend(p, k, shared_bytes);
    const size_t pages = (size_t)p.max_tokens / KVANT_PAGE_TOKENS,
                 most = (args.workspace_bytes - scratch_at) /
                        (KVANT_CUDA_SCRATCH_PER_BLOCK(head_dim) * pages);
    if (unpack_bytes == 0 || attend_bytes == 0 || most == 0)
        return KVANT_ERR_UNSUPPORTED;
    const int all = p.batch * p.kv_heads,
              at_once = pairs_at_once(p, (int64_t)most, multiprocessors);
    p.unpacked.pages = (int)pages;
    p.unpacked.matrices = scratch;
    p.unpacked.units = reinterpret_cast<float4 *>(
        scratch + pages * at_once * (size_t)(k.key_bytes + k.value_bytes));
    for (p.first_pair = 0; p.first_pair < all; p.first_pair += at_once) {
        const int64_t blocks = cut(p, std::min(at_once, all - p.first_pair), multiprocessors);
        if (blocks == 0)
            return KVANT_ERR_UNSUPPORTED;
        p.sealed_ready = args.table_ready && args.sealed_ready && p.first_pair == 0;
        /* a tile without parts needs no counter */
        p.cleared = args.clear_counters && p.splits > 1 ? (int)(blocks / p.splits) : 0;
        cudaError_t error =
            launch_after(k.unpack, multiprocessors, k.unpack_threads, unpack_bytes, &p, stream);
        if (error == cudaSuccess)
            error = launch_after(k.attend, blocks, k.attend_threads, attend_bytes,
                                 static_cast<TileShape *>(&p), stream);
        if (error != cudaSuccess)
            return from_cuda(error);
    }
    return KVANT_OK;
}

/* ---- codes as operands ---- */

template <class K, class V> static CodesKernel codes_of_head_dim(uint32_t head_dim, int rows)
{
    return head_dim == 64    ? pair_codes<K, V, 64>(rows)
           : head_dim == 128 ? pair_codes<K, V, 128>(rows)
                             : CodesKernel{};
}

static CodesKernel find_codes_kernel(const kvant_cuda_params &k, const kvant_cuda_params &v,
                                     int64_t rows)
{
#define KVANT_FIND_CODES(K, V)                                                                     \
    if (rows > MOST_COLUMNS && rows <= GROUP_ROWS && k.kind == K::KIND && v.kind == V::KIND)       \
        return codes_of_head_dim<K, V>(k.head_dim, (int)rows);
    KVANT_CUDA_CODE_PAIRS(KVANT_FIND_CODES)
#undef KVANT_FIND_CODES
    return CodesKernel{};
}

/* The kernel for the problem's rows if there are more rows than columns of decode kernels. None
 * when it does not fit, or when the loaded code has no body. These kernels know a single key
 * transform and no centres of keys. */
static CodesKernel codes_kernel(const kvant_cuda_kernel_attention_args &args, int shared_bytes)
{
    if (args.k_center || args.page_offsets || args.n_matrices > 1)
        return CodesKernel{};
    const int64_t rows = (int64_t)args.query_tokens * (args.n_heads / args.n_kv_heads);
    const CodesKernel k = find_codes_kernel(args.k_codec->params, args.v_codec->params, rows);
    cudaFuncAttributes code;
    const bool fits = k.kernel && k.shared_bytes + 1024 <= shared_bytes &&
                      cudaFuncGetAttributes(&code, k.kernel) == cudaSuccess &&
                      code.sharedSizeBytes > 0;
    return fits ? k : CodesKernel{};
}

bool prefers_codes(const kvant_cuda_kernel_attention_args &args, int shared_bytes)
{
    return codes_kernel(args, shared_bytes).kernel != nullptr;
}

kvant_status launch_tiles(const kvant_cuda_kernel_attention_args &args, const AttentionArgs &common,
                          int multiprocessors, int shared_bytes, size_t used, cudaStream_t stream)
{
    TileArgs p{};
    static_cast<AttentionArgs &>(p) = common;
    p.keys = tile_codec(*args.k_codec);
    p.values = tile_codec(*args.v_codec);
    const uint32_t head_dim = args.k_codec->params.head_dim;
    const int64_t rows = (int64_t)p.query_tokens * p.heads_a_kv;
    const size_t scratch_at = (used + 1023) / 1024 * 1024;
    if (rows > KVANT_CUDA_SCRATCH_ROWS && args.workspace_bytes > scratch_at) {
        const kvant_status status =
            launch_unpacked(args, p, scratch_at, multiprocessors, shared_bytes, stream);
        if (status != KVANT_ERR_UNSUPPORTED)
            return status;
    }
    const cudaError_t cleared = clear_counters(args, stream);
    if (cleared != cudaSuccess)
        return from_cuda(cleared);
    const CodesKernel codes = codes_kernel(args, shared_bytes);
    if (codes.kernel) {
        p.row_groups = 1;
        const int64_t blocks = cut(p, p.batch * p.kv_heads, multiprocessors);
        if (blocks)
            return from_cuda(
                launch(codes.kernel, blocks, codes.threads, codes.shared_bytes, &p, stream));
    }
    const TileKernel kernel = kernel_of(head_dim);
    const int bytes = kernel.kernel ? choose_shape(p, kernel, rows, shared_bytes) : 0;
    const int64_t blocks = bytes ? cut(p, p.batch * p.kv_heads, multiprocessors) : 0;
    if (blocks == 0)
        return KVANT_ERR_UNSUPPORTED;
    return from_cuda(launch(kernel.kernel, blocks, kernel.threads, bytes, &p, stream));
}

} // namespace kvant
