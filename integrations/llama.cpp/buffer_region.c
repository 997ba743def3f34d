/* buffer_region.c - see buffer_region.h. */
#include "buffer_region.h"

#include <pthread.h>
#include <stdlib.h>

#include "buffer.h"
#include "cpu_rows.h"
#include "ggml_api.h"
#include "gpu/gpu.h"
#include "host.h"
#include "trace.h"

static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER;
static kvp_region *live;

static void region_link(kvp_region *region)
{
    pthread_mutex_lock(&live_lock);
    region->next = live;
    live = region;
    pthread_mutex_unlock(&live_lock);
}

static void region_unlink(kvp_region *region)
{
    kvp_region **at;

    pthread_mutex_lock(&live_lock);
    for (at = &live; *at != NULL && *at != region; at = &(*at)->next)
        ;
    if (*at != NULL)
        *at = region->next;
    pthread_mutex_unlock(&live_lock);
}

kvp_region *kvp_region_create(size_t size, abi_buffer *inner)
{
    kvp_region *region = calloc(1, sizeof(*region));

    if (region == NULL)
        return NULL;
    region->size = size;
    region->inner = inner;
    if (inner != NULL)
        region->base = inner->iface.get_base(inner);
    else
        region->base = kvp_host_reserve(size);
    if (region->base == NULL) {
        free(region);
        return NULL;
    }
    region_link(region);
    return region;
}

void kvp_region_free(kvp_region *region)
{
    if (kvp_trace_is_on)
        kvp_trace_close(region);
    region_unlink(region);
    kvp_cpu_rows_free(region);
    for (size_t i = 0; i < region->n_tensors; i++)
        kvp_kv_free(region->tensors[i]);
    for (size_t role = 0; role < 2; role++)
        kvp_steps_free(&region->steps[role]);
    if (region->inner != NULL)
        kvp_api.buffer_free(region->inner);
    else
        kvp_host_release(region->base, region->size);
    kvp_placement_free(region->placement);
    free(region->tensors);
    free(region);
}

bool kvp_region_add(kvp_region *region, kvp_kv *kv)
{
    kvp_kv **tensors;

    /* A huge page would make memory resident that nobody wrote: gaps between tensors, and cells. */
    if (region->n_tensors == 0 && region->inner == NULL)
        kvp_host_refuse_huge_pages(region->base, region->size);
    /* Another thread may be reading the list. */
    pthread_mutex_lock(&live_lock);
    tensors = realloc(region->tensors, (region->n_tensors + 1) * sizeof(kvp_kv *));
    if (tensors != NULL) {
        region->tensors = tensors;
        region->tensors[region->n_tensors++] = kv;
    }
    pthread_mutex_unlock(&live_lock);
    return tensors != NULL;
}

bool kvp_region_is_free(const kvp_region *region, const char *at, size_t bytes)
{
    if (at < region->base || bytes > region->size ||
        (size_t)(at - region->base) > region->size - bytes)
        return false;
    for (size_t i = 0; i < region->n_tensors; i++) {
        const char *other = region->tensors[i]->memory;
        if (at < other + region->tensors[i]->reserved && other < at + bytes)
            return false;
    }
    return true;
}

static size_t resident_bytes(const kvp_region *region)
{
    return region->inner != NULL ? region->size : kvp_host_resident(region->base, region->size);
}

size_t kvp_buffer_kv_memory(size_t *reserved)
{
    size_t resident = 0, mapped = 0;
    bool on_gpus = false;

    pthread_mutex_lock(&live_lock);
    for (const kvp_region *region = live; region != NULL; region = region->next) {
        if (region->n_tensors == 0)
            continue;
        resident += resident_bytes(region);
        for (size_t i = 0; i < region->n_tensors; i++)
            resident += kvp_kv_extra_bytes(region->tensors[i]);
        mapped += region->size;
        on_gpus = on_gpus || region->remote != NULL;
    }
    pthread_mutex_unlock(&live_lock);
    if (reserved != NULL)
        *reserved = mapped;
    return resident + (on_gpus ? kvp_gpu_held() : 0);
}

bool kvp_buffer_kv_size(bool on_gpu, kvp_kv_size *size)
{
    kvp_kv_size sum = { .size = sizeof(sum) }, part;
    bool all = size != NULL && size->size == sizeof(*size);

    pthread_mutex_lock(&live_lock);
    for (const kvp_region *region = live; region != NULL; region = region->next)
        for (size_t i = 0; i < region->n_tensors && all; i++) {
            const kvp_kv *kv = region->tensors[i];
            const bool there = kvp_kv_is_bound(kv) && on_gpu == (kv->remote != NULL);
            part = kv->full;
            all = there || (on_gpu && kvp_kv_size_now(kv, on_gpu, &part));
            kvp_kv_size_add(&sum, &part);
        }
    pthread_mutex_unlock(&live_lock);
    if (all)
        *size = sum;
    return all;
}

bool kvp_buffer_kv_size_at(bool on_gpu, double tokens, kvp_kv_size *size, double *in_place)
{
    kvp_kv_size sum = { .size = sizeof(sum) }, part = sum;
    bool all = size != NULL && size->size == sizeof(*size) && in_place != NULL;
    size_t room = SIZE_MAX;

    pthread_mutex_lock(&live_lock);
    for (const kvp_region *region = live; region != NULL; region = region->next)
        for (size_t i = 0; i < region->n_tensors && all; i++) {
            const kvp_kv *kv = region->tensors[i];
            const size_t fit = kvp_kv_tokens_in_place(kv, on_gpu);
            all = kvp_kv_is_bound(kv) && kvp_kv_size_at(kv, on_gpu, tokens, &part);
            kvp_kv_size_add(&sum, &part);
            room = fit < room ? fit : room;
        }
    pthread_mutex_unlock(&live_lock);
    if (all) {
        *size = sum;
        *in_place = room < SIZE_MAX ? (double)room : 0;
    }
    return all;
}
