/* page.c - see page.h. */
#include "page.h"

#include "../../../src/base/half.h"
#include "../../../src/codec/encode.h"
#if KVANT_PAPERS
#include "../../../src/cuda/papers/halves.h"
#endif
#include "../../unit/calibrated.h"
#include "../../unit/testing.h"

static void *aligned_bytes(size_t bytes)
{
    const size_t whole = (bytes / 256 + 1) * 256;
    return memset(aligned_alloc(256, whole), 0, whole);
}

/* Places tables as copy_tables in params.c does. */
static void place_tables(test_page *to, const kvant_codec_view *view)
{
#if KVANT_PAPERS
    const size_t own = (view->table_bytes + 15) / 16 * 16;
    to->tables = aligned_bytes(own + kvant_cuda_halves_bytes(&to->general));
    if (view->table_bytes)
        memcpy(to->tables, view->tables, view->table_bytes);
    to->general.tables = to->tables;
    if (kvant_cuda_halves_bytes(&to->general) == 0)
        return;
    to->general.halves = (uint32_t)(own / sizeof(float));
    kvant_cuda_halves(&to->general, view->tables, (uint16_t *)to->tables + own / sizeof(uint16_t));
#else
    (void)to, (void)view;
#endif
}

static void place_trellis(test_page *to, const kvant_codec_view *view)
{
    to->params.codes = KVANT_CUDA_CODES_TRELLIS;
    to->params.step = view->of.trellis.unit;
    for (uint32_t i = 0; i < 4u << to->params.bits; i++)
        to->levels[i] = kvant_half_from_float(view->of.trellis.levels[i]);
}

/* Returns NULL if there is no such codec. */
static kvant_codec *create(const char *spec, uint32_t head_dim, kvant_role role)
{
    kvant_codec *codec = NULL;
    kvant_calibration *calibration =
        strncmp(spec, "kmeans", 6) == 0 ? calibrate_fixed(head_dim) : NULL;
    if (calibration)
        kvant_codec_create_calibrated(spec, head_dim, role, 0, calibration, 0, 0, &codec, NULL, 0);
    else
        kvant_codec_create(spec, head_dim, role, 3, &codec, NULL, 0);
    kvant_calibration_free(&calibration);
    return codec;
}

bool test_page_make(const char *spec, uint32_t head_dim, kvant_role role, test_page *to)
{
    static uint64_t rng = 5;
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    memset(to, 0, sizeof *to);
    to->codec = create(spec, head_dim, role);
    if (!to->codec)
        return false;
    const kvant_codec_view *view = kvant_codec_get_view(to->codec);
    const kvant_codec_info *info = &to->codec->info;
    to->view = view;
    const kvant_cuda_error error = { NULL, 0 };
    if (kvant_cuda_params_init(&to->gpu, view, &error) != KVANT_OK)
        abort();
    free(to->gpu.tables);
    to->general = (kvant_general){ .view = view->general,
                                   .head_dim = head_dim,
                                   .keys = role == KVANT_ROLE_K,
                                   .metadata = (uint32_t)info->metadata_offset };
    to->params = (kvant_cuda_params){ .head_dim = head_dim,
                                      .bits = info->bits,
                                      .metadata_offset = (uint32_t)info->metadata_offset };
    if (view->kind == KVANT_CODES_TRELLIS)
        place_trellis(to, view);
    if (view->kind == KVANT_CODES_CODEBOOK)
        to->params.codes = KVANT_CUDA_CODES_CODEBOOK, to->values = view->of.codebook.values;
    place_tables(to, view);
    to->page = aligned_bytes(info->page_bytes);
    to->bytes = (uint32_t)(info->metadata_offset + info->metadata_bytes);
    to->rows = malloc((size_t)64 * head_dim * sizeof *to->rows);
    fill_normal(to->rows, 64 * head_dim, &rng);
    for (uint32_t i = 0; i < 64 * head_dim; i++) /* tokens have very different sizes */
        to->rows[i] *= i / head_dim % 7 == 3 ? 1e-3f : i / head_dim % 7 == 5 ? 300.0f : 1.0f;
    kvant_codec_encode_transformed(to->codec, kernels, to->rows, 0, 64, to->page);
    for (uint32_t t = 0; t < 64; t++)
        kvant_codec_decode_transformed(to->codec, kernels, to->page, t,
                                       to->rows + (size_t)t * head_dim);
    return true;
}

void test_page_free(test_page *page)
{
    kvant_codec_free(&page->codec);
    free(page->tables);
    free(page->page);
    free(page->rows);
}

/* Replaces the function of params.c, because nothing here is on a GPU. */
void kvant_cuda_tables_free(kvant_cuda_tables_of *tables)
{
}
