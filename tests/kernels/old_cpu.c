/* old_cpu.c - does this emulator refuse what its CPU lacks? Exits with 0 when an AVX2 instruction is illegal: without that,
 * running check_kernels under it would show nothing. */
#include <immintrin.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static volatile int
    numbers[2]; /* on the stack, AVX would set them to zero before the handler is there */

static void refused(int number)
{
    (void)number;
    static const char text[] = "AVX2 is an illegal instruction here\n";
    _exit(write(STDOUT_FILENO, text, sizeof text - 1) < 0);
}

int main(void)
{
    signal(SIGILL, refused);
    __m256i x = _mm256_add_epi32(_mm256_set1_epi32(numbers[0]), _mm256_set1_epi32(1));
    numbers[1] = _mm256_extract_epi32(x, 3);
    puts("this machine executes AVX2");
    return 1;
}
