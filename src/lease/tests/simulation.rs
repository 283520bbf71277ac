// SPDX-License-Identifier: Apache-2.0
//! Three candidates with clocks of their own, calls that are late, lost, or done without an answer: never two writers at once.

use std::time::Duration;

use proptest::prelude::*;

use crate::lease::candidate::{Candidate, CandidateStep, LeaseTiming};
use crate::lease::record::LeaseRecord;

/// What becomes of a call, in milliseconds and luck.
#[derive(Clone, Copy, Debug)]
struct CallFaults {
    there: u64,
    back: u64,
    request_lost: bool,
    answer_lost: bool,
    /// How long the candidate itself hangs before it takes its next step.
    stall: u64,
}

const CALM: CallFaults = CallFaults { there: 5, back: 5, request_lost: false, answer_lost: false, stall: 0 };

fn fate() -> impl Strategy<Value = CallFaults> {
    let late = prop_oneof![6 => 1..50u64, 2 => 50..2_500u64, 1 => 2_500..30_000u64];
    let stall = prop_oneof![12 => Just(0u64), 1 => 0..5_000u64, 1 => 5_000..40_000u64];
    (late.clone(), late, prop::bool::weighted(0.15), prop::bool::weighted(0.15), stall).prop_map(
        |(there, back, request_lost, answer_lost, stall)| CallFaults {
            there,
            back,
            request_lost,
            answer_lost,
            stall,
        },
    )
}

/// A clock in thousandths of real speed, and what it showed at the beginning.
#[derive(Clone, Copy, Debug)]
struct SimClock {
    speed: u64,
    start: u64,
}

impl SimClock {
    fn local(self, real: u64) -> Duration {
        Duration::from_micros(self.start * 1000 + real * self.speed)
    }

    fn real(self, local: Duration) -> u64 {
        u64::try_from(local.as_micros()).expect("short").div_ceil(self.speed)
    }
}

#[derive(Clone, Debug)]
enum Request {
    Read,
    Write { over: Option<String> },
}

#[derive(Clone, Debug)]
enum SimEvent {
    /// The candidate looks what to do.
    Wakes,
    /// A request reaches the server.
    Arrives { call: u64, request: Request, sent: Duration, fate: CallFaults },
    /// An answer reaches the candidate, or its patience ends.
    Ends { call: u64, answer: CallResult, sent: Duration },
}

#[derive(Clone, Debug)]
enum CallResult {
    Read(Option<LeaseRecord>),
    Wrote(LeaseRecord),
    Failed,
}

struct Simulation {
    timing: LeaseTiming,
    clocks: Vec<SimClock>,
    candidates: Vec<Candidate>,
    /// The call that each waits for.
    waiting: Vec<u64>,
    stored: Option<LeaseRecord>,
    version: u64,
    calls: u64,
    /// Time in milliseconds, who, what; kept in order.
    agenda: Vec<(u64, usize, SimEvent)>,
    fates: Vec<CallFaults>,
    /// From when on all goes well.
    calm_from: u64,
    now: u64,
}

impl Simulation {
    fn new(clocks: Vec<SimClock>, fates: Vec<CallFaults>, calm_from: u64) -> Self {
        let timing = LeaseTiming::default();
        let candidates: Vec<_> = clocks
            .iter()
            .enumerate()
            .map(|(who, clock)| Candidate::new(format!("candidate-{who}"), timing, clock.local(0)))
            .collect();
        let agenda = (0..candidates.len()).map(|who| (0, who, SimEvent::Wakes)).collect();
        Self {
            timing,
            waiting: vec![0; candidates.len()],
            candidates,
            clocks,
            stored: None,
            version: 0,
            calls: 0,
            agenda,
            fates,
            calm_from,
            now: 0,
        }
    }

    fn fate(&self) -> CallFaults {
        if self.now >= self.calm_from || self.fates.is_empty() {
            return CALM;
        }
        let at = usize::try_from(self.calls).expect("small") % self.fates.len();
        self.fates[at]
    }

    fn local(&self, who: usize) -> Duration {
        self.clocks[who].local(self.now)
    }

    fn holders(&self) -> Vec<usize> {
        let holds =
            |who: &usize| self.candidates[*who].held_until().is_some_and(|until| self.local(*who) < until);
        (0..self.candidates.len()).filter(holds).collect()
    }

    fn run(&mut self, end: u64) -> Result<(), TestCaseError> {
        loop {
            let next =
                self.agenda.iter().enumerate().min_by_key(|(at, (time, ..))| (*time, *at)).map(|(at, _)| at);
            let Some(next) = next.filter(|at| self.agenda[*at].0 <= end) else {
                self.now = end;
                return Ok(());
            };
            let (time, who, what) = self.agenda.remove(next);
            self.now = time;
            match what {
                SimEvent::Wakes => self.wakes(who),
                SimEvent::Arrives { call, request, sent, fate } => {
                    self.arrives(who, call, &request, sent, fate);
                }
                SimEvent::Ends { call, answer, sent } => self.ends(who, call, answer, sent),
            }
            prop_assert!(self.holders().len() <= 1, "at {} ms: {:?}", self.now, self.holders());
        }
    }

    fn wakes(&mut self, who: usize) {
        let local = self.local(who);
        match self.candidates[who].step(local) {
            CandidateStep::Sleep(wait) => {
                let at = self.clocks[who].real(local + wait) - self.clocks[who].real(local) + self.now;
                self.agenda.push((at.max(self.now + 1), who, SimEvent::Wakes));
            }
            CandidateStep::Read => self.send(who, Request::Read, local),
            // The version is of the record that was read or written last, which the candidate keeps.
            CandidateStep::Write => {
                let over = self.candidates[who].version().map(str::to_owned);
                self.send(who, Request::Write { over }, local);
            }
        }
    }

    fn send(&mut self, who: usize, request: Request, sent: Duration) {
        let fate = self.fate();
        self.calls += 1;
        let call = self.calls;
        self.waiting[who] = call;
        if !fate.request_lost {
            self.agenda.push((self.now + fate.there, who, SimEvent::Arrives { call, request, sent, fate }));
        }
        let patience = u64::try_from(self.timing.call.as_millis()).expect("short");
        self.agenda.push((
            self.now + patience,
            who,
            SimEvent::Ends { call, answer: CallResult::Failed, sent },
        ));
    }

    fn arrives(&mut self, who: usize, call: u64, request: &Request, sent: Duration, fate: CallFaults) {
        let answer = match request {
            Request::Read => CallResult::Read(self.stored.clone()),
            Request::Write { over } if *over == self.stored.as_ref().map(|record| record.version.clone()) => {
                self.version += 1;
                let record = LeaseRecord {
                    version: self.version.to_string(),
                    holder: Some(format!("candidate-{who}")),
                    duration: Some(self.timing.duration),
                };
                self.stored = Some(record.clone());
                CallResult::Wrote(record)
            }
            Request::Write { .. } => CallResult::Failed,
        };
        if !fate.answer_lost {
            self.agenda.push((self.now + fate.back, who, SimEvent::Ends { call, answer, sent }));
        }
    }

    fn ends(&mut self, who: usize, call: u64, answer: CallResult, sent: Duration) {
        if self.waiting[who] != call {
            return;
        }
        self.waiting[who] = 0;
        let local = self.local(who);
        let candidate = &mut self.candidates[who];
        match answer {
            CallResult::Read(record) => candidate.observed(record, local),
            CallResult::Wrote(record) => candidate.renewed(record, sent, local),
            CallResult::Failed => candidate.failed(local, 0.5),
        }
        self.agenda.push((self.now + self.fate().stall, who, SimEvent::Wakes));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn never_two_writers_and_one_in_the_end(
        // The fastest is 1.4 times as fast as the slowest; the lease allows for half as fast again.
        clocks in prop::collection::vec((850..1_190u64, 0..100_000_000u64), 3),
        fates in prop::collection::vec(fate(), 1..60),
    ) {
        let clocks = clocks.into_iter().map(|(speed, start)| SimClock { speed, start }).collect();
        let mut simulation = Simulation::new(clocks, fates, 300_000);
        simulation.run(400_000)?;
        prop_assert_eq!(simulation.holders().len(), 1, "nobody leads after a while of calm");
    }
}

#[test]
fn without_faults_one_leads_from_the_start_to_the_end() {
    let clocks = vec![SimClock { speed: 1000, start: 0 }; 3];
    let mut simulation = Simulation::new(clocks, Vec::new(), 0);
    simulation.run(100).expect("safe");
    let first = simulation.holders();
    assert_eq!(first.len(), 1);
    simulation.run(600_000).expect("safe");
    assert_eq!(simulation.holders(), first);
}

/// The test can fail: with a deadline as long as clocks of different speed make dangerous, two do write at once.
#[test]
fn the_simulation_finds_an_unsafe_deadline() {
    let clocks = vec![
        SimClock { speed: 850, start: 7 },
        SimClock { speed: 1_190, start: 99 },
        SimClock { speed: 1_000, start: 0 },
    ];
    let silence = CallFaults { request_lost: true, ..CALM };
    let found = (1..40).any(|good| {
        let fates: Vec<_> = (0..40).map(|at| if at < good { CALM } else { silence }).collect();
        let mut simulation = Simulation::new(clocks.clone(), fates, 300_000);
        simulation.timing.deadline = simulation.timing.duration * 2;
        for (who, clock) in clocks.iter().enumerate() {
            simulation.candidates[who] =
                Candidate::new(format!("candidate-{who}"), simulation.timing, clock.local(0));
        }
        simulation.run(300_000).is_err()
    });
    assert!(found);
}
