/* old_cpu.c - checks that the emulator refuses the instructions that its CPU lacks. Exits with 0 if
 * an AVX2 instruction is illegal. Otherwise a run of check_kernels in the emulator would show
 * nothing. */
#include <immintrin.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

static volatile int
    numbers[2]; /* on the stack, AVX would set them to zero before the handler is installed */

static void refused(int number)
{
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
