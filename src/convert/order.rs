//! What many threads make, taken by one in order.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rayon::ThreadPool;

/// Makes items 0 to `count` on all threads of a pool and takes them here, one after the other in their order.
///
/// At most `ahead` items are made and not taken at any time; what was taken is given to `make` again, for its memory. When
/// `take` fails, nothing more is begun. Each thread borrows one of `tools`, and gives it back.
pub(super) fn in_order<T, S, E>(
    pool: &ThreadPool,
    count: usize,
    ahead: usize,
    spare: &mut Vec<T>,
    tools: &Mutex<Vec<S>>,
    make: &(dyn Fn(&mut S, usize, &mut T) + Sync),
    take: &mut dyn FnMut(usize, &mut T) -> Result<(), E>,
) -> Result<(), E>
where
    T: Default + Send,
    S: Default + Send,
    E: Send,
{
    let shared = Shared {
        state: Mutex::new(State {
            made: BTreeMap::new(),
            spare: std::mem::take(spare),
            next: 0,
            turn: 0,
            ended: false,
        }),
        changed: Condvar::new(),
    };
    let result = pool.in_place_scope(|scope| {
        for _ in 0..pool.current_num_threads().min(count) {
            scope.spawn(|_| work(&shared, count, ahead, tools, make));
        }
        let result = (0..count).try_for_each(|number| {
            let Some(mut item) = shared.take(number) else { return Ok(()) };
            let taken = take(number, &mut item);
            shared.give_back(item);
            taken
        });
        shared.end();
        result
    });
    *spare = std::mem::take(&mut shared.lock().spare);
    result
}

fn work<T: Default, S: Default>(
    shared: &Shared<T>,
    count: usize,
    ahead: usize,
    tools: &Mutex<Vec<S>>,
    make: &(dyn Fn(&mut S, usize, &mut T) + Sync),
) {
    let _ended = EndOnPanic(shared);
    let mut tool = tools.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
    while let Some((number, mut item)) = shared.begin(count, ahead) {
        make(&mut tool, number, &mut item);
        shared.made(number, item);
    }
    tools.lock().unwrap_or_else(PoisonError::into_inner).push(tool);
}

struct State<T> {
    made: BTreeMap<usize, T>,
    spare: Vec<T>,
    /// The next to be begun.
    next: usize,
    /// The next to be taken.
    turn: usize,
    ended: bool,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

impl<T: Default> Shared<T> {
    /// Number and memory of an item to be made now; `None` when there is nothing more to do.
    fn begin(&self, count: usize, ahead: usize) -> Option<(usize, T)> {
        let mut state = self.lock();
        while !state.ended && state.next < count && state.next >= state.turn + ahead.max(1) {
            state = self.wait(state);
        }
        if state.ended || state.next >= count {
            return None;
        }
        state.next += 1;
        Some((state.next - 1, state.spare.pop().unwrap_or_default()))
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State<T>>) -> MutexGuard<'a, State<T>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn made(&self, number: usize, item: T) {
        self.lock().made.insert(number, item);
        self.changed.notify_all();
    }

    /// Waits for an item; `None` if it will never come.
    fn take(&self, number: usize) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(item) = state.made.remove(&number) {
                return Some(item);
            }
            if state.ended {
                return None;
            }
            state = self.wait(state);
        }
    }

    fn give_back(&self, item: T) {
        let mut state = self.lock();
        state.spare.push(item);
        state.turn += 1;
        drop(state);
        self.changed.notify_all();
    }

    fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }
}

/// A thread that panics makes no more items: nobody must wait for one. The pool passes the panic on.
struct EndOnPanic<'a, T>(&'a Shared<T>);

impl<T> Drop for EndOnPanic<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn pool(threads: usize) -> ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
    }

    #[test]
    fn items_come_in_order_and_memory_is_used_again() {
        for threads in [1, 2, 5] {
            let (mut taken, mut spare, tools) = (Vec::new(), Vec::new(), Mutex::new(Vec::<usize>::new()));
            let (begun, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let made = AtomicUsize::new(0);
            let make = |_: &mut usize, number: usize, item: &mut Vec<usize>| {
                let open = begun.fetch_add(1, Ordering::SeqCst) + 1 - made.load(Ordering::SeqCst);
                most.fetch_max(open, Ordering::SeqCst);
                std::thread::sleep(std::time::Duration::from_micros((number as u64 * 7919) % 300));
                *item = vec![number];
            };
            let mut take = |number: usize, item: &mut Vec<usize>| {
                assert_eq!(*item, [number]);
                made.fetch_add(1, Ordering::SeqCst);
                taken.push(number);
                Ok::<(), ()>(())
            };
            in_order(&pool(threads), 200, 6, &mut spare, &tools, &make, &mut take).unwrap();
            assert_eq!(taken, (0..200).collect::<Vec<_>>());
            assert!(most.into_inner() <= 6 && spare.len() <= 6, "{} spare", spare.len());
            assert!(tools.lock().unwrap().len() <= threads);
        }
    }

    #[test]
    fn a_failure_ends_the_work() {
        let begun = AtomicUsize::new(0);
        let make = |_: &mut (), _: usize, _: &mut u8| {
            begun.fetch_add(1, Ordering::SeqCst);
        };
        let mut take = |number: usize, _: &mut u8| if number == 3 { Err("three") } else { Ok(()) };
        let failed = in_order(&pool(2), 1000, 4, &mut Vec::new(), &Mutex::default(), &make, &mut take);
        assert_eq!(failed, Err("three"));
        assert!(begun.into_inner() <= 9);
    }

    #[test]
    #[should_panic(expected = "seven")]
    fn a_panic_is_passed_on() {
        let make = |_: &mut (), number: usize, _: &mut u8| assert!(number != 7, "seven");
        let mut take = |_: usize, _: &mut u8| Ok::<(), ()>(());
        let _ = in_order(&pool(2), 100, 4, &mut Vec::new(), &Mutex::default(), &make, &mut take);
    }
}
