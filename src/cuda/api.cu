/* api.cu - the functions of cuda.h that write and decode pages: argument checks and launches,
 * no arithmetic. attention/launch.cu has the functions of attention. */
#include "any/any.h"
#include "centers.h"
#include "checks.h"
#include "encode/append.h"
#include "encode/queries.h"
#include "pages/pages.h"
#include "table.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <iterator>

using namespace kvant;

namespace
{

constexpr uint32_t MAX_GRID_Y = 65535;

AppendRole role_of(const kvant_cuda_codec &codec, const kvant_cuda_pages &pages)
{
    AppendRole role{};
    role.codec = codec.params;
    role.source = &codec;
    role.base = static_cast<uint8_t *>(pages.base);
    role.block_stride = pages.block_stride;
    role.head_stride = pages.head_stride;
    return role;
}

bool has_groups(const kvant_cuda_params &codec)
{
    return codec.grouping != KVANT_CUDA_GROUP_TOKEN;
}

bool groups_of_tokens(const kvant_cuda_params &codec)
{
    return codec.grouping == KVANT_CUDA_GROUP_TOKENS;
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
    case KVANT_CUDA_CODES_QUATERNIONS:
    case KVANT_CUDA_CODES_GENERAL: break;
    }
    return nullptr;
}

/* Whether a kernel of any/ appends or seals the role. No other kernel encodes chunks, appends
 * groups of channels or computes feedback. These kernels take one role per launch. */
bool accepts_any(const kvant_cuda_params &codec, bool seals)
{
    return kvant_cuda_needs_any(&codec) || kvant_cuda_has_chunks(&codec) || codec.feedback ||
           (has_groups(codec) && !seals);
}

/* Whether one launch takes both roles. launch_append can take uniform codes for keys with codebooks
 * for values, or the reverse. In all other launches, the codes of both roles are of one kind. */
bool share_launch(const kvant_cuda_params &a, const kvant_cuda_params &b, bool seals)
{
    const AppendLaunch launch = append_launch_of(a);
    return !accepts_any(a, seals) && !accepts_any(b, seals) && launch == append_launch_of(b) &&
           (launch == launch_append || a.codes == b.codes);
}

/* Whether launch_append_wide takes both roles: a narrow codebook next to a wide one. */
bool share_books(const kvant_cuda_params &a, const kvant_cuda_params &b, bool seals)
{
    return a.codes == KVANT_CUDA_CODES_CODEBOOK && b.codes == KVANT_CUDA_CODES_CODEBOOK &&
           !accepts_any(a, seals) && !accepts_any(b, seals);
}

/* The roles of an append or a seal. */
struct Roles {
    AppendRole at[2];
    int n;
};

/* The launch of one role, or of both roles that share a launch. */
AppendLaunch launch_of_roles(const AppendRole *roles, int n)
{
    const AppendLaunch last = append_launch_of(roles[n - 1].codec);
    return last == launch_append_wide ? last : append_launch_of(roles[0].codec);
}

AppendLaunch choose_launch(const AppendRole *roles, int n, const AppendArgs &args)
{
    const AppendLaunch usual = launch_of_roles(roles, n);
    const bool simple =
        usual == launch_append || usual == launch_append_wide || usual == launch_append_open;
    return simple && !args.from && !args.listed && args.n_tokens <= MOST_FEW ? launch_append_short
                                                                             : usual;
}

/* Launches once for the roles first .. end - 1. common: the arguments which all roles share. */
kvant_status launch_some(const Roles &roles, int first, int end, const AppendArgs &common,
                         uint32_t n_kv_heads, kvant_cuda_stream stream)
{
    AppendArgs args = common;
    std::copy(roles.at + first, roles.at + end, args.roles);
    const kvant_cuda_params &codec = args.roles[0].codec;
    if (accepts_any(codec, args.from != nullptr))
        return kvant_cuda_is_general(&codec) || codec.codes == KVANT_CUDA_CODES_UNIFORM
                   ? launch_general(args, (int)n_kv_heads, static_cast<cudaStream_t>(stream))
                   : from_cuda(launch_append_any(args, (int)n_kv_heads,
                                                 static_cast<cudaStream_t>(stream)));
    const int n = end - first;
    return from_cuda(choose_launch(args.roles, n, args)(args, codec.head_dim, n, (int)n_kv_heads,
                                                        static_cast<cudaStream_t>(stream)));
}

bool one_launch(const Roles &roles, const AppendArgs &common)
{
    const kvant_cuda_params &a = roles.at[0].codec, &b = roles.at[1].codec;
    const bool seals = common.from != nullptr;
    return roles.n == 1 || share_launch(a, b, seals) || share_books(a, b, seals);
}

/* Whether launch_append_short appends the first role's rows. */
bool appends_short(const Roles &roles, const AppendArgs &common)
{
    const int n = one_launch(roles, common) ? roles.n : 1;
    return !accepts_any(roles.at[0].codec, false) &&
           choose_launch(roles.at, n, common) == launch_append_short;
}

/* Whether the launch that appends the rows can also transform queries and subtract the centres of
 * keys. */
bool accepts_more(const Roles &roles, const AppendArgs &common)
{
    bool matrix = false;
    for (int i = 0; i < roles.n; i++)
        matrix |= roles.at[i].codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL;
    return matrix && one_launch(roles, common) && appends_short(roles, common);
}

/* Whether the launch of the keys subtracts the centres of their blocks. */
bool accepts_centers(const Roles &roles, const AppendArgs &common)
{
    return roles.at[0].codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL &&
           (accepts_more(roles, common) ||
            (one_launch(roles, common) &&
             choose_launch(roles.at, roles.n, common) == launch_append_open));
}

kvant_status launch_roles(const Roles &roles, const AppendArgs &common, uint32_t n_kv_heads,
                          kvant_cuda_stream stream)
{
    if (common.n_tokens == 0 && !common.listed)
        return KVANT_OK;
    if (one_launch(roles, common))
        return launch_some(roles, 0, roles.n, common, n_kv_heads, stream);
    const kvant_status status = launch_some(roles, 0, 1, common, n_kv_heads, stream);
    return status == KVANT_OK ? launch_some(roles, 1, 2, common, n_kv_heads, stream) : status;
}

/* Weights must be given if the codec uses them, and only then. */
bool valid_key_transform(const kvant_cuda_params &codec, const float *key_transform)
{
    return (codec.key_transform_kind != KVANT_CUDA_TRANSFORM_NONE) == (key_transform != nullptr);
}

bool valid_rows(const kvant_cuda_rows &rows, uint32_t n_kv_heads, bool transformed)
{
    return !rows.codec ||
           (rows.rows && valid_pages(rows.pages, rows.codec->params.page_bytes, n_kv_heads) &&
            (transformed ? !rows.center && !rows.scale && !rows.key_transform
                         : valid_key_transform(rows.codec->params, rows.key_transform)));
}

void without_transform(kvant_cuda_params &codec)
{
    codec.rotation = kvant_cuda_rotation{};
    codec.key_transform_kind = KVANT_CUDA_TRANSFORM_NONE;
}

/* Checks and adds the arguments which appends and seals have in common. The matrices of k_feedback
 * must be given if the codec of the keys uses feedback, and only then. */
template <class Args> bool add_shared(Roles &to, const Args &args)
{
    const kvant_cuda_codec *k = args.k.codec, *v = args.v.codec;
    if ((!k && !v) || (k && v && k->params.head_dim != v->params.head_dim) ||
        (v && v->params.feedback) || (k && k->params.feedback) != (args.k_feedback != nullptr))
        return false;
    if (k)
        to.at[0].feedback = args.k_feedback;
    for (int i = 0; i < to.n; i++)
        to.at[i].centroids = args.centroids[to.at[i].codec.role];
    return true;
}

void add_rows(Roles &to, const kvant_cuda_rows &rows, float *exact, bool transformed)
{
    AppendRole &role = to.at[to.n++] = role_of(*rows.codec, rows.pages);
    role.rows = rows.rows;
    role.token_stride = rows.token_stride;
    role.row_head_stride = rows.head_stride;
    role.center = rows.center;
    role.scale = rows.scale;
    role.key_transform = rows.key_transform;
    role.exact = exact;
    if (transformed)
        without_transform(role.codec);
}

bool valid_queries(const kvant_cuda_kernel_query_args &args)
{
    if (args.n_further >= KVANT_CUDA_MOST_MATRICES ||
        std::any_of(args.further, args.further + args.n_further,
                    [](const float *matrix) { return !matrix; }) ||
        (args.compact && (args.compact >> args.n_further >> 1 || !args.k_codec ||
                          args.k_codec->has_dense_rotation)))
        return false;
    return args.k_codec && args.q && args.out && args.inverse_key_transform &&
           valid_type(args.type) && args.n_kv_heads > 0 && args.n_heads > 0 &&
           args.n_heads % args.n_kv_heads == 0 && args.n_kv_heads <= MAX_GRID_Y &&
           args.batch <= MAX_GRID_Y / (1 + args.n_further) &&
           args.k_codec->params.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL;
}

QueryArgs queries_of(const kvant_cuda_kernel_query_args &args)
{
    QueryArgs queries{ args.type,
                       args.q,
                       args.q_batch_stride,
                       args.q_head_stride,
                       args.out,
                       args.batch,
                       args.n_further + 1,
                       args.n_heads / args.n_kv_heads,
                       { args.inverse_key_transform } };
    std::copy_n(args.further, args.n_further, queries.matrices + 1);
    queries.compact = args.compact;
    queries.ready = args.ready != 0;
    queries.rotation = args.k_codec->rotation;
    return queries;
}

kvant_status transform_queries(const kvant_cuda_kernel_query_args &args, kvant_cuda_stream stream)
{
    if (args.batch == 0)
        return KVANT_OK;
    return from_cuda(launch_queries(queries_of(args), args.k_codec->params.head_dim,
                                    args.n_kv_heads, static_cast<cudaStream_t>(stream)));
}

bool valid_queries_of(const kvant_cuda_kernel_append_args &args)
{
    const kvant_cuda_kernel_query_args &queries = args.queries;
    return !queries.q || (valid_queries(queries) && queries.batch == args.n_tokens &&
                          queries.n_kv_heads == args.n_kv_heads && args.k.codec &&
                          queries.k_codec->params.head_dim == args.k.codec->params.head_dim);
}

/* Checks the arguments with which the centres of blocks are subtracted from keys, in the launch of
 * the keys or in one before it. */
bool valid_centers(const kvant_cuda_kernel_append_args &args)
{
    return !args.k_block_centers.start ||
           (args.k.codec && !args.transformed && args.type == KVANT_CUDA_F32 && args.center_slots &&
            args.centered &&
            valid_block_centers(args.k_block_centers, args.k.codec->params.head_dim));
}

bool valid_compact(const kvant_cuda_kernel_append_args &args)
{
    return !args.k_compact ||
           (args.k.codec && args.k_matrix && !args.transformed &&
            !args.k.codec->has_dense_rotation &&
            args.k.codec->params.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL);
}

/* Lets the launch of the keys read the compact form of their W, or makes W unless it is there. */
kvant_status place_matrix(const kvant_cuda_kernel_append_args &args, Roles &roles,
                          const AppendArgs &common, kvant_cuda_stream stream)
{
    AppendRole &keys = roles.at[0];
    keys.after = args.k.codec->rotation;
    if (args.n_tokens == 0)
        return KVANT_OK;
    if (appends_short(roles, common)) {
        keys.compact = args.k_compact;
        return KVANT_OK;
    }
    if (args.k_matrix_of && *args.k_matrix_of == args.k_compact)
        return KVANT_OK;
    const cudaError_t error = launch_expand(keys.codec.head_dim, args.n_kv_heads, args.k_compact,
                                            args.k_matrix, static_cast<cudaStream_t>(stream));
    if (args.k_matrix_of)
        *args.k_matrix_of = error == cudaSuccess ? args.k_compact : nullptr;
    return from_cuda(error);
}

kvant_status center_keys(const kvant_cuda_kernel_append_args &args, AppendRole &keys,
                         kvant_cuda_stream stream)
{
    const uint32_t d = keys.codec.head_dim;
    kvant_cuda_center_rows_args of{};
    of.size = sizeof of;
    of.rows = args.k.rows;
    of.type = args.type;
    of.token_stride = args.k.token_stride;
    of.head_stride = args.k.head_stride;
    of.n_tokens = args.n_tokens;
    of.n_kv_heads = args.n_kv_heads;
    of.head_dim = d;
    of.slots = args.center_slots;
    of.block_centers = args.k_block_centers;
    of.out = args.centered;
    keys.rows = args.centered;
    keys.token_stride = (size_t)args.n_kv_heads * d;
    keys.row_head_stride = d;
    return kvant_cuda_table_center_rows(&of, stream);
}

bool valid_seal(const kvant_cuda_seal_pages &pages, uint32_t n_kv_heads, bool exact)
{
    return !pages.codec ||
           (pages.codec->params.codes != KVANT_CUDA_CODES_OPEN &&
            !(exact && has_groups(pages.codec->params)) &&
            valid_pages(pages.open, open_bytes(pages.codec->params) * (exact ? 2 : 1),
                        n_kv_heads) &&
            valid_pages(pages.sealed, pages.codec->params.page_bytes, n_kv_heads));
}

void add_open_pages(Roles &to, const kvant_cuda_seal_pages &pages, size_t number_bytes)
{
    AppendRole &role = to.at[to.n++] = role_of(*pages.codec, pages.sealed);
    without_transform(role.codec);
    role.rows = pages.open.base;
    role.token_stride = role.codec.head_dim;
    role.row_head_stride = pages.open.head_stride / number_bytes;
    role.row_block_stride = pages.open.block_stride / number_bytes;
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
                             "no NVIDIA driver, or no GPU that can be used: %s",
                             cudaGetErrorString(error == cudaSuccess ? cudaErrorNoDevice : error));
}

kvant_status kvant_cuda_table_append(const kvant_cuda_kernel_append_args *given,
                                     kvant_cuda_stream stream)
{
    if (!given)
        return KVANT_ERR_ARGUMENT;
    kvant_cuda_kernel_append_args with_matrix = *given;
    const kvant_cuda_kernel_append_args *const args = &with_matrix;
    if (given->k_compact)
        with_matrix.k.key_transform = given->k_matrix;
    if (args->size != sizeof *args || !args->slots || !valid_type(args->type) ||
        args->n_kv_heads == 0 || args->n_kv_heads > MAX_GRID_Y ||
        !valid_rows(args->k, args->n_kv_heads, args->transformed) ||
        !valid_rows(args->v, args->n_kv_heads, args->transformed) || !valid_queries_of(*args) ||
        !valid_centers(*args) || !valid_compact(*args))
        return KVANT_ERR_ARGUMENT;
    Roles roles{};
    for (const kvant_cuda_rows *rows : { &args->k, &args->v }) {
        if (!rows->codec)
            continue;
        if (groups_of_tokens(rows->codec->params))
            return KVANT_ERR_UNSUPPORTED;
        add_rows(roles, *rows, args->exact[rows == &args->v], args->transformed);
    }
    if (!add_shared(roles, *args))
        return KVANT_ERR_ARGUMENT;
    for (const kvant_cuda_rows *rows : { &args->k, &args->v })
        if (rows->codec && rows->codec->params.dense && !args->transformed)
            return KVANT_ERR_UNSUPPORTED;
    AppendArgs common{};
    common.type = args->type;
    common.n_tokens = args->n_tokens;
    common.slots = args->slots;
    common.refused = args->refused;
    common.marks = args->marks;
    common.mark_ids = args->mark_ids;
    common.slots_ready = args->slots_ready != 0;
    common.next_early = args->next_early != 0;
    common.clear_refused = args->clear_refused != 0;
    const bool more = accepts_more(roles, common), apart = args->queries.q && !more;
    if (args->queries.q && !apart)
        common.queries = queries_of(args->queries);
    kvant_status status = KVANT_OK;
    if (args->k_block_centers.start && accepts_centers(roles, common))
        common.block_centers = args->k_block_centers, common.center_slots = args->center_slots;
    else if (args->k_block_centers.start)
        status = center_keys(*args, roles.at[0], stream);
    if (status == KVANT_OK && args->k_compact)
        status = place_matrix(*args, roles, common, stream);
    if (status == KVANT_OK)
        status = launch_roles(roles, common, args->n_kv_heads, stream);
    return apart && status == KVANT_OK ? transform_queries(args->queries, stream) : status;
}

kvant_status kvant_cuda_table_seal(const kvant_cuda_seal_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->from || !args->to || args->n_kv_heads == 0 ||
        args->n_kv_heads > MAX_GRID_Y || args->n_blocks > INT_MAX / KVANT_PAGE_TOKENS ||
        !valid_seal(args->k, args->n_kv_heads, args->exact) ||
        !valid_seal(args->v, args->n_kv_heads, args->exact))
        return KVANT_ERR_ARGUMENT;
    Roles roles{};
    for (const kvant_cuda_seal_pages *pages : { &args->k, &args->v })
        if (pages->codec)
            add_open_pages(roles, *pages, args->exact ? sizeof(float) : sizeof(uint16_t));
    if (!add_shared(roles, *args))
        return KVANT_ERR_ARGUMENT;
    AppendArgs common{};
    common.type = args->exact ? KVANT_CUDA_F32 : KVANT_CUDA_F16;
    common.n_tokens = args->n_blocks * KVANT_PAGE_TOKENS;
    common.refused = args->refused;
    common.from = args->from;
    common.to = args->to;
    common.tokens = args->tokens;
    return launch_roles(roles, common, args->n_kv_heads, stream);
}

kvant_status kvant_cuda_table_seal_rows(const kvant_cuda_seal_rows_args *args,
                                        kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || args->n_kv_heads == 0 ||
        args->n_kv_heads > MAX_GRID_Y || args->most_rows > INT_MAX ||
        (args->most_rows && (!args->from || !args->to || !args->n_rows)))
        return KVANT_ERR_ARGUMENT;
    Roles roles{};
    for (const kvant_cuda_seal_pages *pages : { &args->k, &args->v }) {
        if (!pages->codec)
            continue;
        if (accepts_any(pages->codec->params, false))
            return KVANT_ERR_UNSUPPORTED;
        if (args->most_rows && !valid_seal(*pages, args->n_kv_heads, false))
            return KVANT_ERR_ARGUMENT;
        add_open_pages(roles, *pages, sizeof(uint16_t));
    }
    if (!roles.n || (roles.n == 2 && roles.at[0].codec.head_dim != roles.at[1].codec.head_dim))
        return KVANT_ERR_ARGUMENT;
    AppendArgs common{};
    common.type = KVANT_CUDA_F16;
    common.n_tokens = args->most_rows;
    common.slots = args->to;
    common.refused = args->refused;
    common.listed = true;
    common.row_ids = args->from;
    common.n_rows = args->n_rows;
    return launch_roles(roles, common, args->n_kv_heads, stream);
}

kvant_status kvant_cuda_table_transform_queries(const kvant_cuda_kernel_query_args *args,
                                                kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !valid_queries(*args))
        return KVANT_ERR_ARGUMENT;
    return transform_queries(*args, stream);
}

kvant_status kvant_cuda_table_decode(const kvant_cuda_decode_args *args, kvant_cuda_stream stream)
{
    if (!args || args->size != sizeof *args || !args->codec || !args->blocks || !args->out ||
        !valid_type(args->type) || args->n_kv_heads == 0 || args->n_kv_heads > MAX_GRID_Y ||
        args->n_blocks > INT_MAX)
        return KVANT_ERR_ARGUMENT;
    const kvant_cuda_params &codec = args->codec->params;
    if (!valid_pages(args->pages, codec.page_bytes, args->n_kv_heads) ||
        (args->transformed ? args->scale || args->inverse_key_transform
                           : !valid_key_transform(codec, args->inverse_key_transform)))
        return KVANT_ERR_ARGUMENT;
    if (codec.dense && !args->transformed)
        return KVANT_ERR_UNSUPPORTED;
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
                  args->scale,
                  args->inverse_key_transform,
                  args->to,
                  args->transformed != 0 };
    if (args->transformed)
        without_transform(p.codec);
    kvant_cuda_codec placed;
    const kvant_status status = kvant_cuda_codec_with_tables(args->codec, args->centroids, &placed);
    if (status != KVANT_OK)
        return status;
    return from_cuda(launch_decode(p, placed, args->n_blocks, args->n_kv_heads,
                                   static_cast<cudaStream_t>(stream)));
}
