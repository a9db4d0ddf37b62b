// An origin's attempt, made again on another device while the job is still there: by whom, and what comes of
// it. Evidence, and never a root cause.
#pragma once

namespace holdfast {

class CrossExamination;
class EvidencePart;
class Topology;
struct Incident;

// The rank that is to make `origin`'s attempt again; -1 when no other rank is a replica of it. One whose own
// attempt was clean before one that is an origin itself; then one on another host, then on another device,
// then any; then the lowest.
int choose_examiner(const Topology& topology, const Incident& incident, int origin);

// Who and where the two are.
void describe_examination(const Topology& topology, int origin, int examiner, CrossExamination* to);

// What the two of them found; null for one that sent nothing.
void judge_examination(const EvidencePart* origin, const EvidencePart* examiner, CrossExamination* to);

}  // namespace holdfast
