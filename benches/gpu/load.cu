// One process of a benchmark: load DIRECTORY NAME. It follows the orders that load.py explains, with these works:
//   fma    one thread computes fused multiply-adds, as a program does that leaves nearly all of the GPU idle
//   wide   a kernel that fills every SM several times
//   small  a short kernel each 10 ms, as an interactive client launches them
//   flood  a kernel of some 5 s with a thread for each place of the GPU
//   fault  a kernel that writes where nothing is
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                     \
    do {                                                                                \
        cudaError_t e_ = (call);                                                        \
        if (e_ != cudaSuccess) {                                                        \
            fprintf(stderr, "%s: %s (%d)\n", #call, cudaGetErrorString(e_), e_);        \
            exit(4);                                                                    \
        }                                                                               \
    } while (0)

__global__ void fma_rounds(float *out, int rounds) {
    float s = out[0], t = 1.0f - s;
    for (int i = 0; i < rounds; i++) {
        s = fmaf(s, t, 0.5f);
        t = fmaf(t, s, 0.25f);
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = s + t;
}

__global__ void write_nowhere() { *reinterpret_cast<volatile int *>(16) = 1; }

struct Work {
    int blocks, threads, rounds, pause_ms, warm_ups = 5;
};

// The same grid whatever part of the GPU a client has: 32 blocks for each of 132 SMs.
const int WIDE = 32 * 132;

static Work work_of(const std::string &name) {
    if (name == "wide") return {WIDE, 128, 100000, 0};
    if (name == "small") return {4, 128, 2000, 10};
    if (name == "flood") return {2 * 132, 1024, 1000000000, 0, 0};
    if (name == "fault") return {0, 0, 0, 0, 0};
    return {1, 1, 1000000, 0};
}

static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

static void unit(const Work &work, float *out) {
    if (work.blocks) fma_rounds<<<work.blocks, work.threads>>>(out, work.rounds);
    else write_nowhere<<<1, 1>>>();
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
}

static void repeat(const Work &work, float *out, double seconds, FILE *answer) {
    std::vector<double> times;
    double began = now();
    while (now() - began < seconds) {
        if (work.pause_ms) std::this_thread::sleep_for(std::chrono::milliseconds(work.pause_ms));
        double start = now();
        unit(work, out);
        times.push_back(now() - start);
    }
    double whole = now() - began;
    std::sort(times.begin(), times.end());
    fprintf(answer, "{\"units\": %zu, \"seconds\": %f, \"median_ms\": %f, \"p99_ms\": %f}\n", times.size(), whole,
            1000 * times[times.size() / 2], 1000 * times[times.size() * 99 / 100]);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    std::string directory = argv[1], name = argv[2], start = directory + "/" + name;
    int sms;
    float *out;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaMalloc(&out, sizeof(float) * WIDE * 128));
    CHECK(cudaMemset(out, 0, sizeof(float) * WIDE * 128));
    Work work = work_of("");
    pid_t parent = getppid();
    for (int number = 0;; number++) {
        std::string path = start + ".order." + std::to_string(number);
        while (access(path.c_str(), F_OK)) {
            if (getppid() != parent) return 0;  // Nobody is left who could give an order.
            usleep(1000);
        }
        std::string word, argument;
        std::ifstream(path) >> word >> argument;
        if (word == "end") return 0;
        FILE *answer = fopen((start + ".new").c_str(), "w");
        if (!answer) return 3;
        if (word == "prepare") {
            work = work_of(argument);
            for (int i = 0; i < work.warm_ups; i++) unit(work, out);
            fprintf(answer, "{\"sms\": %d}\n", sms);
        } else {
            repeat(work, out, atof(argument.c_str()), answer);
        }
        fclose(answer);
        rename((start + ".new").c_str(), (start + ".done." + std::to_string(number)).c_str());
    }
}
