// SPDX-License-Identifier: Apache-2.0
//! Three candidates with clocks of their own, calls that are late, lost, or done without an answer: never two writers at once.

use std::time::Duration;

use proptest::prelude::*;

use crate::lease::candidate::{Candidate, Step, Timing};
use crate::lease::record::Record;

/// What becomes of a call, in milliseconds and luck.
#[derive(Clone, Copy, Debug)]
struct Fate {
    there: u64,
    back: u64,
    request_lost: bool,
    answer_lost: bool,
    /// How long the candidate itself hangs before it takes its next step.
    stall: u64,
}

const CALM: Fate = Fate { there: 5, back: 5, request_lost: false, answer_lost: false, stall: 0 };

fn fate() -> impl Strategy<Value = Fate> {
    let late = prop_oneof![6 => 1..50u64, 2 => 50..2_500u64, 1 => 2_500..30_000u64];
    let stall = prop_oneof![12 => Just(0u64), 1 => 0..5_000u64, 1 => 5_000..40_000u64];
    (late.clone(), late, prop::bool::weighted(0.15), prop::bool::weighted(0.15), stall).prop_map(
        |(there, back, request_lost, answer_lost, stall)| Fate {
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
struct Clock {
    speed: u64,
    start: u64,
}

impl Clock {
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
enum Happens {
    /// The candidate looks what to do.
    Wakes,
    /// A request reaches the server.
    Arrives { call: u64, request: Request, sent: Duration, fate: Fate },
    /// An answer reaches the candidate, or its patience ends.
    Ends { call: u64, answer: Answer, sent: Duration },
}

#[derive(Clone, Debug)]
enum Answer {
    Read(Option<Record>),
    Wrote(Record),
    Failed,
}

struct World {
    timing: Timing,
    clocks: Vec<Clock>,
    candidates: Vec<Candidate>,
    /// The call that each waits for.
    waiting: Vec<u64>,
    stored: Option<Record>,
    version: u64,
    calls: u64,
    /// Time in milliseconds, who, what; kept in order.
    agenda: Vec<(u64, usize, Happens)>,
    fates: Vec<Fate>,
    /// From when on all goes well.
    calm_from: u64,
    now: u64,
}

impl World {
    fn new(clocks: Vec<Clock>, fates: Vec<Fate>, calm_from: u64) -> Self {
        let timing = Timing::default();
        let candidates: Vec<_> = clocks
            .iter()
            .enumerate()
            .map(|(who, clock)| Candidate::new(format!("candidate-{who}"), timing, clock.local(0)))
            .collect();
        let agenda = (0..candidates.len()).map(|who| (0, who, Happens::Wakes)).collect();
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

    fn fate(&self) -> Fate {
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
                Happens::Wakes => self.wakes(who),
                Happens::Arrives { call, request, sent, fate } => {
                    self.arrives(who, call, &request, sent, fate);
                }
                Happens::Ends { call, answer, sent } => self.ends(who, call, answer, sent),
            }
            prop_assert!(self.holders().len() <= 1, "at {} ms: {:?}", self.now, self.holders());
        }
    }

    fn wakes(&mut self, who: usize) {
        let local = self.local(who);
        match self.candidates[who].step(local) {
            Step::Sleep(wait) => {
                let at = self.clocks[who].real(local + wait) - self.clocks[who].real(local) + self.now;
                self.agenda.push((at.max(self.now + 1), who, Happens::Wakes));
            }
            Step::Read => self.send(who, Request::Read, local),
            // The version is of the record that was read or written last, which the candidate keeps.
            Step::Write => {
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
            self.agenda.push((self.now + fate.there, who, Happens::Arrives { call, request, sent, fate }));
        }
        let patience = u64::try_from(self.timing.call.as_millis()).expect("short");
        self.agenda.push((self.now + patience, who, Happens::Ends { call, answer: Answer::Failed, sent }));
    }

    fn arrives(&mut self, who: usize, call: u64, request: &Request, sent: Duration, fate: Fate) {
        let answer = match request {
            Request::Read => Answer::Read(self.stored.clone()),
            Request::Write { over } if *over == self.stored.as_ref().map(|record| record.version.clone()) => {
                self.version += 1;
                let record = Record {
                    version: self.version.to_string(),
                    holder: Some(format!("candidate-{who}")),
                    duration: Some(self.timing.duration),
                };
                self.stored = Some(record.clone());
                Answer::Wrote(record)
            }
            Request::Write { .. } => Answer::Failed,
        };
        if !fate.answer_lost {
            self.agenda.push((self.now + fate.back, who, Happens::Ends { call, answer, sent }));
        }
    }

    fn ends(&mut self, who: usize, call: u64, answer: Answer, sent: Duration) {
        if self.waiting[who] != call {
            return;
        }
        self.waiting[who] = 0;
        let local = self.local(who);
        let candidate = &mut self.candidates[who];
        match answer {
            Answer::Read(record) => candidate.saw(record, local),
            Answer::Wrote(record) => candidate.wrote(record, sent, local),
            Answer::Failed => candidate.failed(local, 0.5),
        }
        self.agenda.push((self.now + self.fate().stall, who, Happens::Wakes));
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
        let clocks = clocks.into_iter().map(|(speed, start)| Clock { speed, start }).collect();
        let mut world = World::new(clocks, fates, 300_000);
        world.run(400_000)?;
        prop_assert_eq!(world.holders().len(), 1, "nobody leads after a while of calm");
    }
}

#[test]
fn without_faults_one_leads_from_the_start_to_the_end() {
    let clocks = vec![Clock { speed: 1000, start: 0 }; 3];
    let mut world = World::new(clocks, Vec::new(), 0);
    world.run(100).expect("safe");
    let first = world.holders();
    assert_eq!(first.len(), 1);
    world.run(600_000).expect("safe");
    assert_eq!(world.holders(), first);
}

/// The test can fail: with a deadline as long as clocks of different speed make dangerous, two do write at once.
#[test]
fn the_simulation_finds_an_unsafe_deadline() {
    let clocks = vec![
        Clock { speed: 850, start: 7 },
        Clock { speed: 1_190, start: 99 },
        Clock { speed: 1_000, start: 0 },
    ];
    let silence = Fate { request_lost: true, ..CALM };
    let found = (1..40).any(|good| {
        let fates: Vec<_> = (0..40).map(|at| if at < good { CALM } else { silence }).collect();
        let mut world = World::new(clocks.clone(), fates, 300_000);
        world.timing.deadline = world.timing.duration * 2;
        for (who, clock) in clocks.iter().enumerate() {
            world.candidates[who] = Candidate::new(format!("candidate-{who}"), world.timing, clock.local(0));
        }
        world.run(300_000).is_err()
    });
    assert!(found);
}
