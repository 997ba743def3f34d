/* bench_vulkan.c - a proof of kvant on GPUs that have Vulkan: SET_ROWS and attention of one token
 * on int-4 pages as compute shaders, compared with the library and timed.
 *
 *     bench_vulkan SHADERS rows|attention [DEVICE]
 *     bench_vulkan SHADERS times SEQUENCES,HEADS,KV_HEADS,HEAD_DIM,TOKENS [DEVICE [WORKGROUPS
 *                  [ROUNDS [THREADS]]]]
 *
 * SHADERS is a folder of set_rows.spv, attention.spv and combine.spv. THREADS are the CPU's; 0
 * leaves the CPU out. Exit status 77: there is no such device. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vulkan.h"

enum { NO_DEVICE = 77 };

uint32_t random_bits(void)
{
    static uint64_t state = 0x9e3779b97f4a7c15u;

    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

float random_unit(void)
{
    return (float)(random_bits() >> 8) / 16777216;
}

float random_normal(void)
{
    float sum = 0;

    for (int i = 0; i < 12; i++)
        sum += random_unit();
    return sum - 6;
}

void random_order(uint32_t *numbers, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t j = random_bits() % (i + 1);
        numbers[i] = numbers[j];
        numbers[j] = i;
    }
}

static bool read_shape(const char *text, shape *s)
{
    unsigned n[5] = { 0 };

    if (sscanf(text, "%u,%u,%u,%u,%u", &n[0], &n[1], &n[2], &n[3], &n[4]) != 5)
        return false;
    *s = (shape){ n[0], n[1], n[2], n[3], n[4] };
    return n[0] > 0 && n[0] <= 2048 && n[1] > 0 && n[1] <= 1024 && n[2] > 0 && n[1] % n[2] == 0 &&
           n[1] / n[2] <= 8 && n[3] > 0 && n[3] % 64 == 0 && n[3] <= 256 && n[4] > 0 &&
           n[4] <= 1 << 20;
}

static uint32_t argument(int argc, char **argv, int i, uint32_t otherwise)
{
    return argc > i ? (uint32_t)strtoul(argv[i], NULL, 10) : otherwise;
}

int main(int argc, char **argv)
{
    times_options o = { 0 };
    const char *command = argc > 2 ? argv[2] : "";
    const bool rows = strcmp(command, "rows") == 0, attention = strcmp(command, "attention") == 0;
    const bool times = strcmp(command, "times") == 0 && argc > 3 && read_shape(argv[3], &o.shape);
    const uint32_t device = argument(argc, argv, times ? 4 : 3, 0);
    bool good = true;

    if (!rows && !attention && !times) {
        fprintf(stderr, "usage: bench_vulkan SHADERS rows|attention [DEVICE]\n"
                        "       bench_vulkan SHADERS times SEQUENCES,HEADS,KV_HEADS,HEAD_DIM,TOKENS"
                        " [DEVICE [WORKGROUPS [ROUNDS [THREADS]]]]\n"
                        "HEAD_DIM: 64, 128, 192 or 256; at most 8 HEADS for each of KV_HEADS\n");
        return 2;
    }
    if (!gpu_list(device))
        return NO_DEVICE;
    gpu_open(device);
    if (rows) {
        good = check_all_rows(argv[1]);
    } else if (attention) {
        good = check_all_attention(argv[1]);
    } else {
        o.workgroups = argument(argc, argv, 5, gpu_is_cpu() ? 16 : 2048);
        o.rounds = argument(argc, argv, 6, 31);
        o.threads = argument(argc, argv, 7, kvant_available_cpus());
        time_shaders(argv[1], &o);
    }
    gpu_close();
    return good ? 0 : 1;
}
