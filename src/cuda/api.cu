/* api.cu - the functions of cuda.h that write, decode and copy pages: argument checks and launches, no arithmetic. Those of
 * attention are in attention/launch.cu. */
#include "checks.h"
#include "encode/append.h"
#include "pages/pages.h"

#include <algorithm>
#include <climits>
#include <iterator>

using namespace kvant;

namespace
{

constexpr uint32_t MAX_GRID_Y = 65535;

AppendRole role_of(const kvant_cuda_codec &codec, const kvant_cuda_pages &pages)
{
    AppendRole role{};
    role.codec = codec.params;
    role.book = &codec.book;
    role.trellis = &codec.trellis;
    role.base = static_cast<uint8_t *>(pages.base);
    role.block_stride = pages.block_stride;
    role.head_stride = pages.head_stride;
    return role;
}

bool has_groups(const kvant_cuda_params &codec)
{
    return codec.grouping != KVANT_CUDA_GROUP_TOKEN;
}

/* An append or a seal may need two launches: the roles of one kernel, then those of another. */
struct Roles {
    AppendArgs args;
    int n;
};

constexpr int APPEND_KERNELS = 8;
using AppendLaunch = cudaError_t (*)(const AppendArgs &, uint32_t, int, int, cudaStream_t);

/* launch_append_chunks has roles of one kind of chunk a launch, launch_append_trellis of as many states. */
constexpr AppendLaunch APPEND_LAUNCHES[APPEND_KERNELS] = { launch_append_open,    launch_seal_groups,
                                                           launch_append_chunks,  launch_append_chunks,
                                                           launch_append,         launch_append_trellis,
                                                           launch_append_trellis, launch_append_trellis };

int append_kernel_of(const kvant_cuda_params &codec)
{
    if (kvant_cuda_has_trellis(codec.kind))
        return 5 + (int)(codec.memory - 8) / 2;
    return codec.kind == KVANT_CUDA_OPEN        ? 0
           : has_groups(codec)                  ? 1
           : !kvant_cuda_has_chunks(codec.kind) ? 4
           : codec.kind <= KVANT_CUDA_OCTOPUS4  ? 2
                                                : 3;
}

/* common: what all roles share. */
kvant_status launch_roles(const Roles (&roles)[APPEND_KERNELS], const AppendArgs &common, uint32_t n_kv_heads,
                          kvant_cuda_stream stream)
{
    kvant_status status = KVANT_OK;
    for (int i = 0; i < APPEND_KERNELS; i++) {
        if (common.n_tokens == 0 || roles[i].n == 0 || status != KVANT_OK)
            continue;
        AppendArgs args = common;
        std::copy(std::begin(roles[i].args.roles), std::end(roles[i].args.roles), args.roles);
        status = from_cuda(APPEND_LAUNCHES[i](args, args.roles[0].codec.head_dim, roles[i].n, (int)n_kv_heads,
                                              static_cast<cudaStream_t>(stream)));
    }
    return status;
}

bool valid_rows(const kvant_cuda_rows &rows, uint32_t n_kv_heads)
{
    return !rows.codec || (rows.rows && valid_pages(rows.pages, rows.codec->params.page_bytes, n_kv_heads));
}

void add_rows(Roles &to, const kvant_cuda_rows &rows)
{
    AppendRole &role = to.args.roles[to.n++] = role_of(*rows.codec, rows.pages);
    role.rows = rows.rows;
    role.token_stride = rows.token_stride;
    role.row_head_stride = rows.head_stride;
    role.center = rows.center;
    role.factors = rows.factors;
}

bool valid_seal(const kvant_cuda_seal_pages &pages, uint32_t n_kv_heads)
{
    return !pages.codec || (pages.codec->params.kind != KVANT_CUDA_OPEN &&
                            valid_pages(pages.open, open_bytes(pages.codec->params), n_kv_heads) &&
                            valid_pages(pages.sealed, pages.codec->params.page_bytes, n_kv_heads));
}

void add_open_pages(Roles &to, const kvant_cuda_seal_pages &pages)
{
    AppendRole &role = to.args.roles[to.n++] = role_of(*pages.codec, pages.sealed);
    role.codec.rotation = kvant_cuda_rotation{}; /* these rows are transformed already */
    role.rows = pages.open.base;
    role.token_stride = role.codec.head_dim;
    role.row_head_stride = pages.open.head_stride / sizeof(uint16_t);
    role.row_block_stride = pages.open.block_stride / sizeof(uint16_t);
}

} // namespace

extern "C" kvant_status kvant_cuda_append(const kvant_cuda_append_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->slots || !valid_type(args->type) || args->n_kv_heads == 0 ||
        args->n_kv_heads > MAX_GRID_Y || !valid_rows(args->k, args->n_kv_heads) ||
        !valid_rows(args->v, args->n_kv_heads))
        return KVANT_ERR_ARGUMENT;
    Roles roles[APPEND_KERNELS]{};
    for (const kvant_cuda_rows *rows : { &args->k, &args->v }) {
        if (!rows->codec)
            continue;
        if (has_groups(rows->codec->params))
            return KVANT_ERR_UNSUPPORTED;
        add_rows(roles[append_kernel_of(rows->codec->params)], *rows);
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

extern "C" kvant_status kvant_cuda_seal(const kvant_cuda_seal_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->from || !args->to || args->n_kv_heads == 0 ||
        args->n_kv_heads > MAX_GRID_Y || args->n_blocks > INT_MAX / KVANT_PAGE_TOKENS ||
        !valid_seal(args->k, args->n_kv_heads) || !valid_seal(args->v, args->n_kv_heads))
        return KVANT_ERR_ARGUMENT;
    Roles roles[APPEND_KERNELS]{};
    for (const kvant_cuda_seal_pages *pages : { &args->k, &args->v })
        if (pages->codec)
            add_open_pages(roles[append_kernel_of(pages->codec->params)], *pages);
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

extern "C" kvant_status kvant_cuda_decode(const kvant_cuda_decode_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->codec || !args->blocks || !args->out ||
        !valid_type(args->type) || args->n_kv_heads == 0 || args->n_kv_heads > MAX_GRID_Y ||
        args->n_blocks > INT_MAX)
        return KVANT_ERR_ARGUMENT;
    const kvant_cuda_params &codec = args->codec->params;
    if (!valid_pages(args->pages, codec.page_bytes, args->n_kv_heads))
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
                  args->factors };
    if (kvant_cuda_has_chunks(codec.kind))
        return from_cuda(launch_decode_chunks(p, args->codec->book, codec.head_dim, args->n_blocks,
                                              args->n_kv_heads, static_cast<cudaStream_t>(stream)));
    if (kvant_cuda_has_trellis(codec.kind))
        return from_cuda(launch_decode_trellis(p, args->codec->trellis, codec.head_dim, args->n_blocks,
                                               args->n_kv_heads, static_cast<cudaStream_t>(stream)));
    return from_cuda(
        launch_decode(p, codec.head_dim, args->n_blocks, args->n_kv_heads, static_cast<cudaStream_t>(stream)));
}

extern "C" kvant_status kvant_cuda_copy_blocks(const kvant_cuda_pages *pages, size_t page_bytes,
                                               uint32_t n_kv_heads, const int32_t *from, const int32_t *to,
                                               uint32_t n, kvant_cuda_stream stream)
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
